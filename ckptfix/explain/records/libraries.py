"""Messages of what is built on torch: TorchScript, distributed checkpoints, Lightning, transformers, timm."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

_DCP = "https://pytorch.org/docs/stable/distributed.checkpoint.html"

LIBRARIES = (
    Record(
        name="no-torchscript",
        example="RuntimeError: PytorchStreamReader failed locating file constants.pkl: file not found",
        patterns=(
            r"failed locating file constants\.pkl",
            r"\[enforce fail at inline_container\.cc:\d+\] \. file not found: [\w./\-]*constants\.pkl",
            r"file not found: (?:archive|[\w\-]+)/(?:constants\.pkl|model\.json)",
        ),
        cause="torch.jit.load opens TorchScript archives only, and this file was made by torch.save: it holds a"
        " state_dict or a pickled model.",
        advice=(
            Advice("opens it", code='torch.load({path}, map_location="cpu")'),
            Advice("shows what it holds", "ckptfix inspect {FILE}"),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.jit.load.html",
    ),
    Record(
        name="torchscript",
        example="RuntimeError: Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``.",
        patterns=(
            r"Cannot use `*weights_only=True`* with TorchScript archives",
            r"received a zip file that looks like a TorchScript archive",
            r"'?RecursiveScriptModule'? object has no attribute '(?:copy|keys|items|get)'",
        ),
        cause="The file is a TorchScript archive: a program together with its weights, and not a checkpoint.",
        advice=(
            Advice(
                "takes its parameters and buffers out as a state_dict",
                "ckptfix repair {FILE} --format pth -o weights.pth",
            ),
            Advice("runs the program as it is", code='torch.jit.load({path}, map_location="cpu")'),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.jit.load.html",
    ),
    Record(
        name="zip-around",
        example="RuntimeError: [enforce fail at inline_container.cc:180] . file in archive is not in a subdirectory:"
        " model.pth",
        patterns=(r"file in archive is not in a subdirectory: (?P<member>\S+)",),
        cause="torch.load takes any zip file for one that torch.save wrote. This one was packed by another program, and"
        " what torch.load reads may be inside of it ({member}).",
        advice=(
            Advice("says what is inside", "ckptfix inspect {FILE}"),
            Advice("writes the checkpoint that is inside", "ckptfix repair {FILE} --format pth -o unpacked.pth"),
        ),
        source="https://github.com/pytorch/pytorch/blob/main/caffe2/serialize/inline_container.cc",
    ),
    Record(
        name="missing-record",
        example="RuntimeError: PytorchStreamReader failed locating file data/12: file not found",
        patterns=(
            r"failed locating file (?P<record>(?!constants\.pkl)[\w./\-]+)",
            r"file not found: (?P<record>(?:[\w\-]+/)?(?:data/\d+|data\.pkl|version|byteorder))",
            r"Expected hasRecord\(\"(?P<record>[\w./\-]+)\"\) to be true",
        ),
        cause="The archive lacks a part of itself ({record}): it was unpacked and packed again in another way, or is"
        " no file of torch.save.",
        advice=(
            Advice("says what is there and what is not", "ckptfix check {FILE}"),
            Advice("writes what is whole", "ckptfix repair {FILE} --salvage"),
        ),
        source="https://github.com/pytorch/pytorch/blob/main/caffe2/serialize/inline_container.cc",
        codes=("FIL2", "FIL102"),
    ),
    Record(
        name="distributed-missing-key",
        example="RuntimeError: Missing key in checkpoint state_dict: optimizer.state.layer.weight.exp_avg.",
        patterns=(r"Missing key in checkpoint state_dict: (?P<key>\S+?)\.?(?:\s|$)",),
        cause="torch.distributed.checkpoint was asked for {key}, and the folder has no such entry: the state_dict to"
        " load into is nested in another way than the one that was saved, or holds more.",
        advice=(
            Advice("lists what the folder holds", "ckptfix inspect {FILE} --verbose"),
            Advice(
                "writes it as one file with the names of your model",
                "ckptfix repair {FILE} --model {MODEL} --format pth -o weights.pth",
            ),
            Advice(
                "loads what is there",
                code="dcp.load(state_dict, planner=DefaultLoadPlanner(allow_partial_load=True), ...)",
            ),
        ),
        source=_DCP,
        codes=("KEY", "FIT"),
        unknown={"key": "something"},
    ),
    Record(
        name="sharded-checkpoint",
        example="RuntimeError: `torch.distributed.tensor` must be imported to load DTensors",
        patterns=(
            r"used a DP world size of (?P<saved>\d+) but the current world size is (?P<now>\d+)",
            r"Automatic adjustment of ZeRO'?s optimizer state partitioning",
            r"`*torch\.distributed\.tensor`* must be imported to load DTensors",
        ),
        cause="The file is one rank's part of a training on several GPUs (FSDP, ZeRO, tensor parallel), and it is"
        " read outside of such a training, or with another number of ranks.",
        advice=(
            Advice("says which part it is and what puts the parts together", "ckptfix check {FILE}"),
            Advice("Give ckptfix the folder with all parts, where they are in torch.distributed.checkpoint's form."),
            Advice(
                "For DeepSpeed's ZeRO: python zero_to_fp32.py CHECKPOINT_FOLDER weights.pth (it lies in that folder)."
            ),
        ),
        source=_DCP,
        codes=("FIL105",),
    ),
    Record(
        name="no-process-group",
        example="ValueError: Default process group has not been initialized, please make sure to call"
        " init_process_group.",
        patterns=(
            r"Default process group has not been initialized",
            r"Need to initialize (?:default )?process group",
        ),
        cause="Something asks for the other processes of a distributed training, and the program was started alone:"
        " SyncBatchNorm in training mode, get_rank() or barrier() in the code, or sharded tensors (FSDP, DTensor) in"
        " the file that is read.",
        advice=(
            Advice(
                "says whether the file is one rank's part, and what puts the parts together", "ckptfix check {FILE}"
            ),
            Advice("uses the stored statistics, so that SyncBatchNorm asks nobody", code="model.eval()"),
            Advice("asks first", code="rank = dist.get_rank() if dist.is_initialized() else 0"),
        ),
        source="https://pytorch.org/docs/stable/distributed.html",
        codes=("FIL105",),
    ),
    Record(
        name="lightning-version",
        example="KeyError: 'pytorch-lightning_version'",
        patterns=(r"KeyError: ['\"]pytorch-lightning_version['\"]",),
        cause="Lightning's load_from_checkpoint takes files of its own Trainer only, and this one is a plain"
        " state_dict or another trainer's.",
        advice=(
            Advice("loads it into the module itself", code="model = Net(...); model.load_state_dict(state_dict)"),
            Advice(
                "compares it with your module and gives it the right names", "ckptfix repair {FILE} --model {MODEL}"
            ),
        ),
        source="https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html",
        codes=("KEY", "FIT"),
    ),
    Record(
        name="transformers-wrapper",
        example="OSError: Unable to load weights from pytorch checkpoint file for 'bert' at 'pytorch_model.bin'. If"
        " you tried to load a PyTorch model from a TF 2.0 checkpoint, please set from_tf=True.",
        patterns=(r"Unable to load weights from pytorch checkpoint file", r"please set from_tf=True"),
        cause="transformers could not open the weights, and guesses at TensorFlow whatever the reason was. Nearly"
        " always the file is cut short, a git-lfs pointer, or refused by weights_only.",
        advice=(
            Advice("says what is wrong with the file", "ckptfix check {FILE}"),
            Advice("Look further up in the traceback for the first exception, and give that to ckptfix explain."),
        ),
        source="https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_utils.py",
        codes=("FIL",),
        general=True,
    ),
    Record(
        name="safetensors-without-format",
        example="OSError: The safetensors archive passed at model.safetensors does not contain the valid metadata."
        " Make sure you save your model with the `save_pretrained` method.",
        patterns=(r"safetensors archive passed at .{1,300} does not contain the valid metadata",),
        cause='transformers wants the entry "format": "pt" in the header of a safetensors file, and this file was'
        " written without"
        " it.",
        advice=(
            Advice("writes the entry", code='safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})'),
        ),
        source="https://huggingface.co/docs/safetensors/api/torch",
    ),
    Record(
        name="safetensors-takes-tensors",
        example="ValueError: Key `epoch` is invalid, expected torch.Tensor but received <class 'int'>",
        patterns=(
            r"Key `(?P<key>[^`]+)` is invalid, expected torch\.Tensor but received",
            r"argument 'metadata': '\w+' object (?:is not an instance of|cannot be converted to) '\w+'",
        ),
        cause="A safetensors file holds tensors by name and texts in its header, and nothing else; {key} is neither."
        " Often the whole container of a training was given in place of its state_dict.",
        advice=(
            Advice(
                "writes the weights, and what is plain beside them into the header",
                "ckptfix repair {FILE} --format safetensors -o weights.safetensors",
            ),
            Advice("gives the weights alone", code='save_file(checkpoint["state_dict"], "weights.safetensors")'),
        ),
        source="https://huggingface.co/docs/safetensors/api/torch",
        unknown={"key": "what was given"},
    ),
    Record(
        name="shared-tensors",
        example="RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and potential"
        " differences when loading them again: [{'lm_head.weight', 'embed.weight'}].",
        patterns=(
            r"Some tensors share memory, this will lead to duplicate memory on disk",
            r"trying to save a non[- ]contiguous tensor: `(?P<key>[^`]+)`",
        ),
        cause="safetensors' save_file takes no tensors that share memory (tied weights) and no views.",
        advice=(
            Advice(
                "writes safetensors with the ties kept in its header",
                "ckptfix repair {FILE} --format safetensors -o weights.safetensors",
            ),
            Advice("saves a model with its ties", code="safetensors.torch.save_model(model, path)"),
        ),
        source="https://huggingface.co/docs/safetensors/torch_shared_tensors",
    ),
    Record(
        name="unknown-timm-model",
        example="RuntimeError: Unknown model (vit_base_patch16_siglip_224)",
        patterns=(r"RuntimeError: Unknown model \((?P<model>[\w.\-]+)\)",),
        cause="The timm that is installed has no model {model}: it came in a later release, or was renamed.",
        advice=(
            Advice("shows what it has under a similar name", code='timm.list_models("*vit*")'),
            Advice("Or: pip install -U timm"),
        ),
        source="https://huggingface.co/docs/timm",
    ),
)
