"""Messages about devices: where the tensors of a file or a model are, and where they should be."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

_LOAD = "https://pytorch.org/docs/stable/generated/torch.load.html"
_RETAG = Advice("writes a copy without device tags, which loads on every machine", "ckptfix repair {FILE}")
_MAP = Advice("reads the file as it is", code='torch.load({path}, map_location="cpu")')
_START = "https://pytorch.org/get-started/locally/"
_RUN_ON_CPU = Advice(
    "runs the model on the CPU, to see that the file is good",
    "ckptfix repair {FILE} --model {MODEL} --device cpu",
)
_ON_CUDA = r"torch\.cuda\.\w+|CUDA\w*Type"
_ON_CPU = r"torch\.(?!cuda)\w+Tensor|CPU\w*Type"

DEVICES = (
    Record(
        name="device-tag",
        example="RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is"
        " False. If you are running on a CPU-only machine, please use torch.load with"
        " map_location=torch.device('cpu') to map your storages to the CPU.",
        patterns=(
            r"Attempting to deserialize object on an? (?P<device>\w+) device",
            r"Attempting to deserialize object on (?P<device>\w+ device \d+)",
            r"don't know how to restore data location of .{1,80}? \(tagged with (?P<device>[\w:]+)\)",
            r"The (?P<device>\w+) device module is not registered",
            r"Storage device not recognized: (?P<device>\w+)",
            r"Attempting to deserialize object on (?P<device>MPS|XPU|HPU|PrivateUse1)",
        ),
        cause="The file remembers the device that each tensor was saved from ({device}), torch.load puts it back"
        " there, and this machine, or this build of torch, has no such device. The weights themselves are fine.",
        advice=(_MAP, _RETAG),
        source=_LOAD,
        codes=("FIL103",),
    ),
    Record(
        name="no-cuda-build",
        example="AssertionError: Torch not compiled with CUDA enabled",
        patterns=(r"Torch not compiled with CUDA enabled",),
        cause="The code asks for a GPU, and the torch that is installed is one for the CPU alone. The checkpoint is not"
        " concerned.",
        advice=(
            Advice("takes what there is", code='device = "cuda" if torch.cuda.is_available() else "cpu"'),
            Advice("Or install a build with CUDA, with the command for your system from the page below."),
            _RUN_ON_CPU,
        ),
        source=_START,
    ),
    Record(
        name="cuda-symbol-missing",
        example="AttributeError: module 'torch._C' has no attribute '_cuda_getDevice'",
        patterns=(r"module 'torch\._C' has no attribute '(?P<symbol>_cuda_\w+)'",),
        cause="A GPU was asked for ({symbol}) and the torch that is installed has no CUDA in it; often the code sets"
        " a device without asking whether there is one. The checkpoint is not concerned.",
        advice=(
            Advice("asks first", code="if torch.cuda.is_available(): torch.cuda.set_device(device)"),
            _MAP,
            Advice("Or install a build with CUDA, with the command for your system from the page below."),
        ),
        source=_START,
    ),
    Record(
        name="no-gpu",
        example="RuntimeError: No CUDA GPUs are available",
        patterns=(
            r"No CUDA GPUs are available",
            r"Found no NVIDIA driver on your system",
            r"CUDA error: no CUDA-capable device is detected",
            r"CUDA error: invalid device ordinal",
            r"cuda runtime error \((?:10|38)\)",
        ),
        cause="Torch was built with CUDA and sees no such GPU: there is none of that number, it has no driver, or"
        " CUDA_VISIBLE_DEVICES hides it. The checkpoint is not concerned.",
        advice=(
            Advice("Look whether nvidia-smi lists a GPU, and what CUDA_VISIBLE_DEVICES says."),
            _MAP,
            _RUN_ON_CPU,
        ),
        source="https://pytorch.org/docs/stable/notes/cuda.html",
    ),
    Record(
        name="old-driver",
        example="RuntimeError: The NVIDIA driver on your system is too old (found version 10010). Please update your"
        " GPU driver.",
        patterns=(
            r"NVIDIA driver on your system is too old(?: \(found version (?P<found>\d+)\))?",
            r"CUDA driver version is insufficient for CUDA runtime version",
        ),
        cause="The GPU's driver (CUDA version {found}) is older than the CUDA that this torch was built with. The"
        " checkpoint is not concerned.",
        advice=(
            Advice("Update the driver, or install a build of torch for an older CUDA from the page below."),
            _RUN_ON_CPU,
        ),
        source="https://pytorch.org/get-started/previous-versions/",
        unknown={"found": "not in this message"},
    ),
    Record(
        name="no-kernel-image",
        example="RuntimeError: CUDA error: no kernel image is available for execution on the device",
        patterns=(r"no kernel image is available", r"with CUDA capability sm_(?P<capability>\d+) is not compatible"),
        cause="This build of torch, or of an extension, has no code for your GPU: the GPU is newer or older than"
        " those that it was compiled for. The checkpoint is not concerned.",
        advice=(
            Advice(
                "compares what the GPU is with what torch was built for",
                code="print(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())",
            ),
            Advice(
                "Install another build of torch; compile extensions anew with TORCH_CUDA_ARCH_LIST set to your GPU's."
            ),
            _RUN_ON_CPU,
        ),
        source=_START,
    ),
    Record(
        name="device-mismatch",
        example="RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0"
        " and cpu!",
        patterns=(
            r"Expected all tensors to be on the same device(?:, but found at least two devices, (?P<one>[\w:]+)"
            r" and (?P<other>[\w:]+))?",
            rf"Input type \((?P<one>{_ON_CUDA})\) and (?:weight|bias) type \((?P<other>{_ON_CPU})\)",
            rf"Input type \((?P<one>{_ON_CPU})\) and (?:weight|bias) type \((?P<other>{_ON_CUDA})\)",
            r"Input type \((?P<one>MPS\w*Type)\) and (?:weight|bias) type \((?P<other>(?!MPS)[\w.]+)\)",
            r"Input type \((?P<one>(?!MPS)[\w.]+)\) and (?:weight|bias) type \((?P<other>MPS\w*Type)\)",
            r"expected (?P<one>CPU|CUDA) tensor \(got (?P<other>CPU|CUDA) tensor\)",
            r"Expected object of backend (?P<one>\w+) but got backend (?P<other>\w+)",
            r"Expected object of device type (?P<one>\w+) but got device type (?P<other>\w+)",
            r"Expected (?:object of type|a Tensor of type) torch\.cuda\.(?P<one>\w+) but found type"
            r" torch\.(?!cuda)(?P<other>\w+)",
            r"Expected (?:object of type|a Tensor of type) torch\.(?!cuda)(?P<one>\w+) but found type"
            r" torch\.cuda\.(?P<other>\w+)",
            r"Placeholder storage has not been allocated on (?P<other>MPS) device",
            r"Input and (?:parameter|hidden) tensors are not at the same device",
        ),
        cause="Two tensors that meet in one operation are on different devices ({one} and {other}): mostly the model"
        " was moved to the GPU and the input was not, or the reverse. The checkpoint is not concerned.",
        advice=(
            Advice("moves both to one device", code="model = model.to(device); x = x.to(device)"),
            Advice(
                "A tensor that the model keeps as a plain attribute does not move with it: make it a buffer with"
                " register_buffer."
            ),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.to",
        unknown={"one": "one", "other": "another"},
    ),
    Record(
        name="no-backend",
        example="NotImplementedError: Could not run 'aten::empty.memory_format' with arguments from the 'MPS' backend.",
        patterns=(
            r"Could not run 'aten::[\w.]+' with arguments from the '(?P<backend>CUDA|MPS|XLA|XPU|HPU|NPU|PrivateUse\d)'"
            r" backend",
            r"not linked with support for (?P<backend>\w+) devices",
        ),
        cause="A tensor is to go to a device of the kind {backend}, and the torch that is installed was built without"
        " it, or has no such operator there. The checkpoint is not concerned.",
        advice=(
            Advice("takes what there is", code='device = "cuda" if torch.cuda.is_available() else "cpu"'),
            Advice("Or install the build for your device, with the command for your system from the page below."),
            _MAP,
        ),
        source=_START,
    ),
    Record(
        name="quantised-and-not",
        example="NotImplementedError: Could not run 'quantized::conv2d.new' with arguments from the 'CPU' backend.",
        patterns=(
            r"Could not run 'quantized::[\w.]+' with arguments from the '(?P<backend>\w+)' backend",
            r"Could not run 'aten::[\w.]+' with arguments from the '(?P<backend>Quantized\w+)' backend",
        ),
        cause="A quantised layer got a tensor that is not quantised, or the reverse ({backend}): the model lacks its"
        " QuantStub and DeQuantStub, or was moved to a device for which torch has no quantised layers.",
        advice=(
            Advice(
                "quantises the input and turns the output back",
                code="model = torch.nn.Sequential(QuantStub(), model, DeQuantStub())  # before prepare and convert",
            ),
            Advice("shows which tensors of the file are quantised", "ckptfix inspect {FILE} --verbose"),
        ),
        source="https://pytorch.org/docs/stable/quantization.html",
    ),
    Record(
        name="attribute-of-wrapper",
        example="AttributeError: 'DataParallel' object has no attribute 'backbone'",
        patterns=(
            r"'(?P<wrapper>DataParallel|DistributedDataParallel|FullyShardedDataParallel)' object has no attribute"
            r" '(?P<attribute>\w+)'",
        ),
        cause="The model is inside of {wrapper}, which has no {attribute} itself. The checkpoint is not concerned.",
        advice=(
            Advice("asks the model inside", code="model.module.{attribute}"),
            Advice("saves without the wrapper's prefix", code="torch.save(model.module.state_dict(), path)"),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.DataParallel.html",
    ),
    Record(
        name="data-parallel-device",
        example="RuntimeError: module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found"
        " one of them on device: cpu",
        patterns=(
            r"module must have its parameters (?:and buffers )?on device (?P<wanted>[\w:]+) \(device_ids\[0\]\)"
            r" but found one of"
            r" them on device: (?P<found>[\w:]+)",
            r"all tensors must be on devices\[0\]",
        ),
        cause="DataParallel copies the model from its first device ({wanted}), and a part of the model is on {found}.",
        advice=(
            Advice(
                "moves the model there before it is wrapped", code='model = torch.nn.DataParallel(model.to("cuda:0"))'
            ),
            Advice(
                "reads the weights on the CPU first",
                code='model.load_state_dict(torch.load({path}, map_location="cpu"))',
            ),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.DataParallel.html",
        unknown={"wanted": "devices[0]", "found": "another one"},
    ),
    Record(
        name="numpy-of-cuda",
        example="TypeError: can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to"
        " host memory first.",
        patterns=(
            r"can't convert (?P<device>[\w:]+ device type|CUDA) tensor to numpy",
            r"Can't call numpy\(\) on (?:Tensor|Variable) that requires grad",
        ),
        cause="numpy sees the memory of the CPU only, and no tensor that gradients are recorded for.",
        advice=(Advice("gives an array", code="x.detach().cpu().numpy()"),),
        source="https://pytorch.org/docs/stable/generated/torch.Tensor.numpy.html",
    ),
    Record(
        name="numpy-of-bfloat16",
        example="TypeError: Got unsupported ScalarType BFloat16",
        patterns=(r"Got unsupported ScalarType (?P<type>\w+)",),
        cause="numpy has no such numbers as these ({type}). The weights are stored that way, which is no fault of the"
        " file.",
        advice=(Advice("gives an array of 32 bits, without loss", code="x.float().numpy()"),),
        source="https://pytorch.org/docs/stable/generated/torch.Tensor.numpy.html",
    ),
    Record(
        name="meta-tensor",
        example="NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()"
        " instead of torch.nn.Module.to() when moving module from meta to a different device.",
        patterns=(
            r"Cannot copy out of meta tensor",
            r"Tensor on device meta is not on the expected device",
            r"is not on the expected device meta",
        ),
        cause="A part of the model has no values: it was built on the meta device (low_cpu_mem_usage, device_map,"
        " init_empty_weights), and the file had no weights for it under that name.",
        advice=(
            Advice("names the parts that the file lacks", "ckptfix check {FILE} --model {MODEL}"),
            Advice(
                "puts the loaded tensors in place of the empty ones",
                code="model.load_state_dict(state_dict, assign=True)",
            ),
        ),
        source="https://pytorch.org/docs/stable/meta.html",
        codes=("KEY", "BUF", "FIT"),
    ),
    Record(
        name="cuda-after-fork",
        example="RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you"
        " must use the 'spawn' start method",
        patterns=(r"Cannot re-initialize CUDA in forked subprocess",),
        cause="A child process uses CUDA that its parent had used already: often torch.load in a DataLoader's worker"
        " puts tensors on the GPU.",
        advice=(_MAP, Advice("starts children anew", code='torch.multiprocessing.set_start_method("spawn")')),
        source="https://pytorch.org/docs/stable/notes/multiprocessing.html",
        codes=("FIL103",),
    ),
)
