"""Genuine messages of many releases, by the name of the record that they match."""

KNOWN: dict[str, tuple[str, ...]] = {
    "does-not-fit": (
        "unexpected_keys=['pretrained.storage_tokens', 'pretrained.local_cls_norm.weight']",
        "Missing keys (64): ['trunk.blocks.0.attn.freqs_cis_real', 'trunk.blocks.0.attn.freqs_cis_imag']...",
        "RuntimeError: Keys 'trunk.ipa.linear_q_points.linear.weight, trunk.ipa.linear_q_points.linear.bias' are"
        " missing.",
        "AssertionError: Attempted to load weight (torch.Size([3600])) into parameter (torch.Size([3584]))",
        "AssertionError: Tried to load weights of size torch.Size([151936, 896])to a parameter of size"
        " torch.Size([151937, 896])",
        "ValueError: Missing key in checkpoint: generator.linear.weight",
        "RuntimeError: ('SmolVLA %d missing / %d unexpected keys', 10, 0)",
        "RuntimeError: Pretrained weights are not compatible with the current network architecture",
        "ERROR: Some specified modules from the pre-trained model don't match with the new model modules:",
        "the strict load found 2 missing keys, 1 size mismatch",
        "the strict load skipped 1 parameter that the file does not supply",
        " | > Layer dimention missmatch between model definition and checkpoint: text_encoder.ffn_layers.1.conv_2.bias",
        "KeyError: 'unexpected key \"module.conv1.weight\" in state_dict'",
        "KeyError: 'missing keys in state_dict: \"{\\'conv1.weight\\', \\'bn1.weight\\'}\"'",
        "AssertionError: Key encoder.stages.0.0.convs.0.conv.weight is missing in the pretrained model weights. The"
        " pretrained weights do not seem to be compatible with your network.",
        "AssertionError: The shape of the parameters of key encoder.stages.0.0.convs.0.conv.weight is not the same.",
        "loaded checkpoint_3.pt and found missing and/or unexpected keys:\nmissing_keys=['trunk.pos_embed']",
        "RuntimeError: While copying the parameter named fc.weight, whose dimensions in the model are torch.Size([2,"
        " 512]) and whose dimensions in the checkpoint are torch.Size([1000, 512]).",
        'RuntimeError: Error(s) in loading state_dict for ResNet:\n\tWhile copying the parameter named "fc.weight",'
        " whose dimensions in the model are torch.Size([2, 512]) and whose dimensions in the checkpoint are torch.Siz"
        "e([1000, 512]).",
        "RuntimeError: Error(s) in loading state_dict for DataParallel:\n\tUnexpected key(s) in state_dict:"
        ' "module.bn1.num_batches_tracked", "module.layer1.0.bn1.num_batches_tracked". ',
        "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight: copying a param"
        " of torch.Size([1000, 512]) from checkpoint, where the shape is torch.Size([2, 512]) in current model.",
        "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight: copying a param"
        " with shape torch.Size([1000, 512]) from checkpoint, the shape in current model is torch.Size([2, 512]).",
        'RuntimeError: Error(s) in loading state_dict for BertModel:\n\tMissing key(s) in state_dict: "embeddings.po'
        'sition_ids". ',
        'RuntimeError: Error(s) in loading state_dict for Net:\n\tUnexpected running stats buffer(s) "1.running_mean'
        '" and "1.running_var" for InstanceNorm2d with track_running_stats=False. If state_dict is a checkpoint'
        " saved before 0.4.0, this may be expected because InstanceNorm does not track running stats by default"
        " since 0.4.0.",
        "_IncompatibleKeys(missing_keys=['fc.weight'], unexpected_keys=['module.fc.weight'])",
        "IncompatibleKeys(missing_keys=['fc.weight'], unexpected_keys=[])",
        "unet unexpected: ['scaled_fp8']",
        "WARNING:root:Unexpected key(s) when loading model: ['normalize_inputs.buffer_observation_state.mean']",
        "ValueError: Received parameters not in model: lm_head.biases lm_head.scales.",
        "Exception: Cannot load model parameters from checkpoint checkpoint_best.pt; please ensure that the"
        " architectures match.",
        "The model and loaded state dict do not match exactly\n\nunexpected key in source state_dict: module.fc.weig"
        "ht\n\nmissing keys in source state_dict: fc.weight",
        "RuntimeError: Error(s) in loading state_dict for BertForSequenceClassification:\n\tsize mismatch for"
        " classifier.weight: copying a param with shape torch.Size([3, 768]) from checkpoint, the shape in current"
        " model is torch.Size([2, 768]).\n\tYou may consider adding `ignore_mismatched_sizes=True` in the model"
        " `from_pretrained` method.",
        "There were missing keys in the checkpoint model loaded: ['lm_head.weight'].",
        "There were unexpected keys in the checkpoint model loaded: ['module.lm_head.weight'].",
    ),
    "storage-failed": (
        "OSError: [Errno 5] Erreur d'entrée/sortie",
        "[Errno 121] Remote I/O error: 'model.pth'",
        "OSError: [Errno 107] Transport endpoint is not connected: '/content/drive/MyDrive/last.ckpt'",
        "OSError: Input/output error (os error 5)",
        "RuntimeError: write(): fd 29 failed with Input/output error",
        "OSError: [WinError 59] An unexpected network error occurred: 'Z:\\\\model.pth'",
        "ERROR: megatron.core.dist_checkpointing.strategies.filesystem_async: Local process 0 encountered an error:"
        " [Errno 5] Input/output error",
    ),
    "path-not-valid": (
        "OSError: [Errno 36] Nom de fichier trop long",
        "OSError: [WinError 123] The filename, directory name, or volume label syntax is incorrect: 'runs\\\\12:30'",
    ),
    "file-in-use": (
        "OSError: [Errno 16] Device or resource busy: '.nfs000000012'",
        "SafetensorError: Error while serializing: I/O error: The requested operation cannot be performed on a file"
        " with a user-mapped section open. (os error 1224)",
    ),
    "no-symbolic-links": (),
    "learning-leaf": (
        "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.",
        "RuntimeError: a view of a leaf Variable that requires grad is being used in an in-place operation.",
    ),
    "result-of-load-state-dict": ("TypeError: '_IncompatibleKeys' object is not callable",),
    "missing-keys-of-load-model": (
        "AssertionError: set() != {'head.regression_head.conv.0.0.weight', 'backbone.body.bn1.num_batches_tracked'}",
        "AssertionError: {'model.blocks.6.t_attn.to_out.weight', 'model.blocks.2.r_mlp.fc1.bias'} != {'a.weight'}",
    ),
    "unknown-encoder-weights": (),
    "model-did-not-load": (
        "ValueError: Something went wrong! Model is not loaded yet ...",
        "AttributeError: 'NoneType' object has no attribute 'is_sdxl'",
        "Stable diffusion model failed to load",
        "AttributeError: 'NoneType' object has no attribute 'sd_model_hash'",
        "AttributeError: 'NoneType' object has no attribute 'state_dict'",
    ),
    "path-not-state-dict": (
        "TypeError: Expected state_dict to be dict-like, got <class 'str'>.",
        "AttributeError: 'PosixPath' object has no attribute 'keys'",
    ),
    "names-of-an-engine": (
        "KeyError: 'transformer.h.0.attn.c_attn.g_idx'",
        "ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.qweight'",
        "KeyError: 'model.layers.0.mlp.gate_up_proj.weight'",
        "llama_model_load: error loading model: error loading model architecture: unknown model architecture:"
        " 'qwen3next'",
        "ERROR:hf-to-gguf:Model Qwen3_5ForCausalLM is not supported",
        "ValueError: Model architectures ['Qwen3_5ForCausalLM'] are not supported for now.",
        "KeyError: 'model.language_model.layers.3.mlp.experts.gate_up_proj_packed'",
        "Parameter model.layers.0.self_attn.fused_wqa_wkv.weight not found in params_dict",
        "ValueError: Parameter blocks.0.to_gate_compress.bias not found in custom model state dict.",
        "KeyError: 'layers.0.mlp.down_proj.weight.absmax'",
        "llama_model_load: error loading model: missing tensor 'token_embd.weight'",
        "llama_model_load: error loading model: check_tensor_dims: tensor 'token_embd.weight' has wrong shape; expected"
        " 2048, 32002, got 2048, 32000, 1, 1",
        "ValueError: Following weights were not initialized from checkpoint: {'model.layers.0.attn.q_norm.weight'}",
        "KeyError: 'layers.0.mlp.experts.gate_up_proj'",
        "AssertionError: Checkpoint does not contain key: model.embed_tokens.weight",
        "Exception: tensor 'token_embd.weight' has wrong shape; expected 4096, 32001, got 4096, 32000",
    ),
    "opened-as-arrays": (
        "OSError: Unable to open file (file signature not found)",
        "ValueError: GGUF magic invalid",
        "gguf_init_from_file_impl: invalid magic characters: 'PK??', expected 'GGUF'",
        "OSError: Unable to synchronously open file (file signature not found)",
        "OSError: Unable to open file (truncated file: eof = 9434, sblock->base_addr = 0, stored_eof = 94341)",
        "_pickle.UnpicklingError: This file contains pickled (object) data. If you trust the file you can load it",
        "onnxruntime.capi.InvalidProtobuf: [ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from best.pt"
        " failed:Protobuf parsing failed.",
        "google.protobuf.message.DecodeError: Error parsing message with type 'onnx.ModelProto'",
    ),
    "no-such-model-type": (
        "KeyError: 'qwen3'",
        "ValueError: Unrecognized configuration class <class 'BertConfig'> for this kind of AutoModel",
        "ValueError: The checkpoint you are trying to load has model type `qwen9` but Transformers does not recognize"
        " this architecture.",
        "RuntimeError: Unsloth: No config file found - are you sure the `model_name` is correct?",
    ),
    "lightning-arguments": (
        "TypeError: LitModel.__init__() got an unexpected keyword argument 'lr_decay'",
        "TypeError: __init__() got an unexpected keyword argument 'pytorch-lightning_version'",
    ),
    "yolov5-file": (
        "This model is NOT forwards compatible with YOLOv8 at https://github.com/ultralytics/ultralytics.",
        "TypeError: ERROR: best.pt is not forwards compatible with YOLOv11",
    ),
    "attribute-of-module": (),
    "part-of-a-pipeline": (
        "AssertionError: You do not have CLIP state dict!",
        "ERROR: VAE is invalid: None\n\nIf the VAE is from a checkpoint loader node your checkpoint does not contain a"
        " valid VAE.",
        "ERROR: clip input is invalid: None\n\nIf the clip is from a checkpoint loader node your checkpoint does not"
        " contain a valid clip or text encoder model.",
        "ValueError: Pipeline <class 'StableDiffusionPipeline'> expected {'vae', 'unet', 'tokenizer'}, but only"
        " {'vae'} were passed.",
    ),
    "spaces-of-agent": ("ValueError: Action spaces do not match: Discrete(4) != Discrete(6)",),
    "missing-entry": (
        "ValueError: Object labeled by 'trainer' from `to_load` is not found in the checkpoint",
        "KeyError: 'dims'",
        "KeyError: 'policy_class'",
        'KeyError: "network_weights"',
        "KeyError: 'rvc_model'",
        "KeyError: 'class_name'",
        "KeyError: 'policy_kwargs'",
    ),
    "bytes-keys": ("TypeError: endswith first arg must be bytes or a tuple of bytes, not str",),
    "deepcopy-of-normed": (
        "RuntimeError: Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the"
        " moment.  If you were attempting to deepcopy a module, this may be because of a torch.nn.utils.weight_norm"
        " usage, see https://github.com/pytorch/pytorch/pull/103001",
    ),
    "newly-initialized": (
        "Some weights of the model checkpoint were not used when initializing UNet2DConditionModel: \n"
        " ['conv_norm_out.bias, conv_norm_out.weight']",
        "WARNING:root:A <class 'LlamaForCausalLM'> model is loaded from './sft', and no v_head weight is found. This IS"
        " expected if you are not resuming PPO training.",
        "LlamaForCausalLM LOAD REPORT from: out\nKey | Status |\nlm_head.weight | MISSING |",
        "layers.{0...39}.mlp.experts.down_proj_packed | UNEXPECTED |\nlayers.{0...39}.mlp.down_proj | MISSING",
        "Some weights of the model checkpoint at bert-base-uncased were not used when initializing BertModel:"
        " ['cls.predictions.bias', 'cls.predictions.transform.dense.weight']",
    ),
    "key-by-hand": (
        "KeyError: 'backbone.stages.0.attns.1.rpe_table'",
        "KeyError: 'pos_embed'",
        "KeyError: 'visual.class_embedding'",
        "KeyError: 'text_projection'",
        "KeyError: 'layers.0.blocks.0.attn.relative_position_bias_table'",
        "KeyError: 'backbone.stages.0.blocks.0.attn.w_msa.relative_position_bias_table'",
        "KeyError: 'layers.0.blocks.1.attn.relative_position_bias_table'",
        "KeyError: 'backbone.layer1.0.bn1.running_mean'",
        "KeyError: 'ema_pts_bbox_head_shared_conv_conv_weight'",
    ),
    "not-a-tar": (
        "RuntimeError: Only one file(not dir) is allowed in the zipfile",
        "gzip.BadGzipFile: Not a gzipped file (b'PK')",
        "tarfile.ReadError: not a gzip file",
        "tarfile.ReadError: not an lzma file",
        "ValueError: model.pth.tar is not a tar archive",
    ),
    "empty-shard": (
        "Adapter default: 14 LoRA tensor(s) have invalid shape: base_model.model.q_proj.lora_A.weight (0,"
        "). A 1-D or zero-sized lora_A / lora_B tensor indicates that DeepSpeed ZeRO-3 / FSDP shards were"
        " not gathered",
    ),
    "shape-of-loaded-tensor": (
        "AssertionError: Shape mismatch: torch.Size([4, 8, 192]) vs torch.Size([4, 8, 96])",
        "ValueError: Size mismatch between saved torch.Size([10]) and current: torch.Size([5]) for fc.bias",
        'ValueError: Trying to set a tensor of shape torch.Size([43176, 8192]) in "weight" (which has shape'
        " torch.Size([0])), this look incorrect.",
    ),
    "missing-adapter-keys": (
        "Missing key for up_blocks.0.attentions.0.attn2.to_v; initializing it to zero.",
        "Loading adapter weights from state_dict led to unexpected keys found in the model:  ['down_block"
        "s.0.lora_A.weight'].",
    ),
    "unused-checkpoint-keys": (
        "Missing keys (head.weight, head.bias) discovered while loading pretrained weights. This is expected if"
        " model is being adapted.",
        "'backbone.res4.1.conv1.norm.running_var' has shape (256,) in the checkpoint but (1024,) in the model!"
        " Skipped.",
        "WARNING [11/04 11:35:50 d2.checkpoint.c2_model_loading]: Shape of norm.weight in checkpoint is"
        " torch.Size([768]),"
        " while shape of backbone.simfp_5.2.norm.weight in model is torch.Size([256]).",
        "Skip loading parameter 'roi_heads.box_predictor.bbox_pred.bias'"
        " to the model due to incompatible shapes: (320,) in the checkpoint but (40,) in the model!",
        "Found keys that are in the model state dict but not in the checkpoint: ['head.weight']",
        "UserWarning: During parameter transfer to Sequential loading from model.ckpt, the transferred parameters did"
        " not have parameters for the key: blocks.0.weight",
        "Transferred 0/349 items from yolov5s.pt",
        "Skip loading parameter class_embed.0.weight, required shapetorch.Size([1, 256]), loaded shapetorch.Size([91,"
        " 256]). If you see this, your model does not fully load the pre-trained weight.",
        "Drop parameter transformer.reference_points.weight.If you see this, your model does not fully load the"
        " pre-trained weight.",
        "Some model parameters or buffers are not found in the checkpoint: backbone.fc.bias",
        "WARNING: roi_heads.box_head.fc1.weight is not in the checkpoint. Please double-check.",
    ),
    "empty-grad-scaler": (),
    "optimizer-of-other-kind": ("KeyError: 'exp_avg'", "KeyError: 'momentum_buffer'", "KeyError: 'lr_mask'"),
    "code-of-other-python": (
        "UserWarning: Could not deserialize object lr_schedule. Consider using `custom_objects` argument",
        'KeyError: "The observation_space and action_space were not given, can\'t verify new environments"',
        "AttributeError: 'Discrete' object has no attribute 'start'",
        "TypeError: __randomstate_ctor() takes from 0 to 1 positional arguments but 2 were given",
        "TypeError: __generator_ctor() takes from 0 to 1 positional arguments but 2 were given",
        "ValueError: <class 'numpy.random._mt19937.MT19937'> is not a known BitGenerator module.",
        "TypeError: an integer is required (got type bytes)",
        "TypeError: code() argument 13 must be str, not int",
        "TypeError: code expected at most 16 arguments, got 18",
        "XXX lineno: 12, opcode: 0",
        "SystemError: unknown opcode",
    ),
    "source-changed": (
        "UserWarning: Unable to retrieve source for container of type DataParallel.",
        "serialization.py:868: SourceChangeWarning: source code of class 'models.resnet.ResNet' has changed.",
    ),
    "optimizer-groups": (
        "ValueError: loaded state dict has a different number of parameter groups",
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
    ),
    "weights-only-class": (
        "WeightsUnpickler error: Can only build Tensor, Parameter, OrderedDict or types allowlisted via"
        " `add_safe_globals`, but got <class 'numpy.dtype[float32]'>",
        "WeightsUnpickler error: Can only build Tensor, parameter or OrderedDict objects, but got <class"
        " 'numpy.dtypes.Float64DType'>",
        "Can only create new object for nn.Parameter or classes allowlisted via `add_safe_globals` but got <class"
        " 'zoo.Config'>",
        "WeightsUnpickler error: Can only build Tensor, parameter or dict objects, but got <class 'numpy.ndarray'>",
        "_pickle.UnpicklingError: Weights only load failed. Re-running `torch.load` with `weights_only` set"
        " to `False` will likely succeed, but it can result in arbitrary code execution. Do it only if you got"
        " the file from a trusted source. Please file an issue with the following so that we can make `weights_only=T"
        "rue` compatible with your use case: WeightsUnpickler error: Unsupported class argparse.Namespace",
        "WeightsUnpickler error: Unsupported global: GLOBAL numpy.core.multiarray.scalar was not an allowed"
        " global by default. Please use `torch.serialization.add_safe_globals([scalar])` to allowlist this global"
        " if you trust this class/function.",
        "Trying to load unsupported GLOBAL posix.system whose module posix is blocked.",
        "RuntimeError: weights_only=True blocked loading this checkpoint because it requires non-allowlis"
        "ted pickle globals. argparse.Namespace No automatic unsafe pickle fallback is performed. If this"
        " checkpoint is trusted, retry with weights_only=False.",
    ),
    "weights-only": (
        "RuntimeError: Can not safely load weights when explicit pickle_module is specified",
        "RuntimeError: Cannot use ``weights_only=True`` with files saved in the legacy .tar format. ",
        "_pickle.UnpicklingError: Weights only load failed. Please file an issue",
        "_pickle.UnpicklingError: Only persistent_load of storage is allowed, but got resource",
        "_pickle.UnpicklingError: persistent_load id must be tuple or int, but got <class 'str'>",
    ),
    "weights-only-warning": (
        "train.py:12: FutureWarning: You are using `torch.load` with `weights_only=False` (the current default"
        " value), which uses the default pickle module implicitly. It is possible to construct malicious pickle"
        " data",
    ),
    "missing-class": (
        "AttributeError: Can't get attribute 'C3k2' on <module 'ultralytics.nn.modules.block' from '/block.py'>",
        "AttributeError: 'module' object has no attribute 'ShiftConv'",
        "AttributeError: Can't get attribute 'Net'",
        "AttributeError: Can't get attribute 'Net' on <module '__main__' (built-in)>",
        "AttributeError: Can't get attribute 'SiLU' on <module 'torch.nn.modules.activation' from '/usr/lib/python3/"
        "dist-packages/torch/nn/modules/activation.py'>",
    ),
    "missing-module": (
        "WARNING runs/best.pt appears to require 'ultralytics.nn', which is not in ultralytics requirements.",
        "ModuleNotFoundError: No module named 'omegaconf._utils'",
        "AttributeError: module 'omegaconf._utils' has no attribute 'is_primitive_type'",
        "AttributeError: module 'models.common' has no attribute 'SPPF'",
        "AttributeError: module 'models' has no attribute 'yolo_head'",
        "ModuleNotFoundError: No module named 'models'",
        "ModuleNotFoundError: No module named 'models.yolo'; 'models' is not a package",
        "ImportError: No module named models",
    ),
    "not-registered": (
        "AssertionError: Could not infer model type from {'_name': 'av_hubert_seq2seq', 'w2v_path': '/base.pt'}."
        " Available models: dict_keys([])",
        "KeyError: \"OrientedRCNN: 'PKINet is not in the models registry'\"",
        "KeyError: 'Mask2Former is not in the mmengine::model registry. Please check whether the value of `Mask2Former`"
        " is correct or it was registered as expected.'",
        "KeyError: \"No object named 'MaskFormer' found in 'META_ARCH' registry!\"",
    ),
    "path-of-other-system": (
        "NotImplementedError: cannot instantiate 'WindowsPath' on your system",
        "pathlib._abc.UnsupportedOperation: cannot instantiate 'PosixPath' on your system",
    ),
    "old-dill": ("ModuleNotFoundError: No module named 'dill'",),
    "state-dict-not-model": (
        "Failed to load model: 'dict' object has no attribute 'to'",
        "AttributeError: 'OrderedDict' object has no attribute 'to'",
        "AttributeError: 'dict' object has no attribute 'cuda'",
        "AttributeError: 'collections.OrderedDict' object has no attribute 'state_dict'",
        "TypeError: 'collections.OrderedDict' object is not callable",
        "AttributeError: 'collections.OrderedDict' object has no attribute 'training'",
    ),
    "load-report-above": ("RuntimeError: You set `ignore_mismatched_sizes` to `False`, thus raising an error.",),
    "does-not-fit-diffusers": (
        "ValueError: Cannot load <class 'diffusers.models.unets.unet_2d_condition.UNet2DConditionModel'> from ./out"
        " because the following keys are missing: \n conv_in.weight.",
        "ValueError: Cannot load conv_in.weight because it has shape (320, 9, 3, 3) in the checkpoint but"
        " shape (320, 4, 3, 3) in UNet2DConditionModel. Pass `ignore_mismatched_sizes=True` to skip it an"
        "d keep the randomly initialized weight.",
        "AttributeError: Parameter or buffer with name=foo.weight not found in model",
    ),
    "adapter-of-another-base": (),
    "adapter-of-old-release": (
        "ValueError: Trying to load old OFT checkpoint, which is no longer supported. Please install PEFT <= v0.15.2 to"
        " load it or train a new OFT adapter.",
        "UserWarning: The cayley-neumann parameterization has been slightly changed to be more numerically stable in"
        " PEFT 0.18.0. Please retrain your adapter weights with newer PEFT versions.",
    ),
    "no-adapter-config": (
        "TypeError: The LoraConfig config that is trying to be loaded is missing required keys: {'peft_type'}.",
    ),
    "settings-of-other-release": (
        "KeyError: 'Non-existent config key: MODEL.RESNETS.STEM_TYPE'",
        "The config attributes {'force_upcast': True} were passed to AutoencoderKL, but are not expected and will"
        " be ignored. Please verify your config.json configuration file.",
        "omegaconf.errors.ConfigKeyError: Key 'eval_wer' not in 'AudioPretrainingConfig'\n    full_key: eval_wer",
        "omegaconf.errors.ConfigKeyError: Key 'config' is not in struct\n    full_key: config",
        "'IterableSimpleNamespace' object has no attribute '__setstate__'. This may be caused by a modified or out"
        " of date"
        " ultralytics 'default.yaml' file.",
        "omegaconf.errors.ConfigAttributeError: Missing key target\n    full_key: target",
    ),
    "no-lora-keys": (
        "AssertionError: weights shape mismatch merging v1 and v2, different dims? / 重みのサイズが合いません",
        "weights shape mismatch merging v1 and v2, skip: lora_te_text_model_encoder_layers_0_mlp_fc1",
        "WARNING SHAPE MISMATCH diffusion_model.output_blocks.5.1.proj_in.weight WEIGHT NOT MERGED"
        " torch.Size([640, 640]) != torch.Size([640])",
        "weight's shape is different: lora_unet_output_blocks_3_0_out_layers_3.lora_down.weight expected"
        " torch.Size([64, 1280, 3, 3]) found torch.Size([64, 1280]). SD version may be different",
        "KeyError: 'single_blocks.0.linear1.lora_A.weight'",
        "ERROR lora diffusion_model.double_blocks.0.img_attn.qkv.weight shape '[9216, 3072]' is invalid for input of"
        " size 14155776",
        "lora key not loaded: lora_unet_down_blocks_0_attentions_0_proj_in.alpha",
        "No LoRA keys associated to UNet2DConditionModel found with the prefix='unet'.",
        "Failed to match keys when loading network /models/Lora/style.safetensors: {'lora_te': 'x'}",
        "ValueError: `state_dict` should be empty at this point but has state_dict.keys()=dict_keys([])",
        "ValueError: Checkpoint not supported because layer lora_unet_foo not supported.",
        "ValueError: Missing lora_B weight for transformer.q",
        "ValueError: Incompatible keys detected: lora_unet_x.alpha",
        "ValueError: The state_dict at hand has these keys which couldn't be parsed: ['a.lora_A.weight']",
        "ValueError: Can not map tensor 'model.layers.0.self_attn.q_proj.lora_A.weight'",
        "Exception: Unexpected tensor name: model.layers.0.self_attn.q_proj.lora_A.weight.",
        "ValueError: While loading /loras/a, expected target modules in ['qkv_proj', 'o_proj'] but received"
        " ['embed_tokens'].",
    ),
    "copying-failed": (),
    "not-an-optimizer": (),
    "weights-without-optimizer": (
        "KeyError: 'message_hub'",
        "Unable to load optimizer from checkpoint /ckpt, exiting. Specify --no-load-rng or --finetune to prevent"
        " attempting to load the random state.",
        "KeyError: 'meta'",
        "KeyError: 'optimizer'",
        "KeyError: 'optimizer_states'",
        "KeyError: 'epoch'",
        "KeyError: 'Trying to restore training state but checkpoint contains only the model. This is prob"
        "ably due to `ModelCheckpoint.save_weights_only` being set to `True`.'",
        "AssertionError: last.pt training to 100 epochs is finished, nothing to resume.",
    ),
    "quantised-weights": (
        "RuntimeError: self and mat2 must have the same dtype, but got Half and Byte",
        "AttributeError: 'Parameter' object has no attribute 'quant_state'",
        "ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models.",
        "ValueError: Linear(in_features=2, out_features=2) does not have a parameter or a buffer named weight_scale.",
    ),
    "tensor-not-in-safetensors": ("WARNING: Removed shared tensor {'model.lm_head.weight'} while saving.",),
    "safetensors-not-installed": (),
    "dtype-of-newer-torch": (
        "Dtype not understood: F8_E4M3",
        "KeyError: torch.float8_e4m3fn",
        "SafetensorError: Error while deserializing header: invalid JSON in header: unknown variant `F4`, expected"
        " one of `BOOL`, `U8` at line 1 column 30",
    ),
    "model-not-state-dict": (
        "AttributeError: 'DataParallel' object has no attribute 'copy'",
        "TypeError: Expected state_dict to be dict-like, got <class '__main__.Net'>.",
        "AttributeError: 'ResNet' object has no attribute 'copy'",
        "AttributeError: 'function' object has no attribute 'copy'",
        "AttributeError: 'YOLOModel' object has no attribute 'keys'",
        "TypeError: 'VisionTransformer' object is not subscriptable",
        "TypeError: argument of type 'ResNet' is not iterable",
    ),
    "container-key": (
        "KeyError: 'actor_state_dict'",
        "KeyError: 'g_running'",
        "RuntimeError: No state_dict found in checkpoint file pretrained/swin_tiny_patch4_window7_224.pth",
        "KeyError: 'model_state_dict'",
    ),
    "git-lfs-pointer": (
        "WeightsUnpickler error: Unsupported operand 118",
        "OSError: You seem to have cloned a repository without having git-lfs installed. Please install git-lfs"
        " and run `git lfs install` followed by `git lfs pull` in the folder you cloned.",
    ),
    "web-page": (
        "_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported operand 60",
        "pickle.UnpicklingError: invalid load key, '<'.",
    ),
    "compressed": (
        "WeightsUnpickler error: Unsupported operand 31",
        "_pickle.UnpicklingError: invalid load key, '\\x1f'.",
    ),
    "no-pickle": (
        "_pickle.UnpicklingError: STACK_GLOBAL requires str",
        "WeightsUnpickler error: Unsupported operand 56\n\nCheck the documentation of torch.load",
        "KeyError: \"filename 'storages' not found\"",
        "WeightsUnpickler error: Unsupported operand 123",
        "_pickle.UnpicklingError: invalid load key, '\\x0a'.",
        "_pickle.UnpicklingError: invalid load key, '\\x00'.",
    ),
    "empty-file": (
        "EOFError: Ran out of input",
        "EOFError",
    ),
    "damaged-archive": (
        "zipfile.BadZipFile: Bad CRC-32 for file 'archive/data/0'",
        "RuntimeError: record size does not match",
        "RuntimeError: [enforce fail at inline_container.cc:345] . PytorchStreamReader failed reading file data/0:"
        " CRC-32 check failed",
        "RuntimeError: [enforce fail at inline_container.cc:142] . PytorchStreamReader failed reading zip archive:"
        " not a ZIP archive",
        "RuntimeError: [enforce fail at inline_container.cc:145] . PytorchStreamReader failed reading zip archive:"
        " invalid header or archive is corrupted",
        "RuntimeError: PytorchStreamReader failed reading file data/3: file read failed",
    ),
    "truncated-file": (
        "_pickle.UnpicklingError: NEWOBJ class argument must be a type, not dict",
        "llama_model_load: error loading model: tensor 'blk.0.attn_q.weight' data is not within the file bounds,"
        " model is corrupted or incomplete",
        "_pickle.UnpicklingError: Memo value not found at index 5",
        "_pickle.UnpicklingError: persistent IDs in protocol 0 must be ASCII strings",
        "_pickle.UnpicklingError: pickle exhausted before end of frame",
        "ValueError: unregistered extension code 12",
        "RuntimeError: unexpected EOF. The file might be corrupted.",
        "RuntimeError: storage has wrong size: expected 9437184 got 2359296",
        "RuntimeError: storage has wrong byte size: expected 9437184 got 2359296",
        "_pickle.UnpicklingError: pickle data was truncated",
        "_pickle.UnpicklingError: unpickling stack underflow",
        "EOFError: Compressed file ended before the end-of-stream marker was reached",
        "OSError: Consistency check failed: file should be of size 440473133 but has size 100000 (pytorch_model.bin).",
        "RuntimeError: setStorage: sizes [10, 10], strides [10, 1], storage offset 0, and itemsize 4 requ"
        "iring a storage size of 400 are out of bounds for storage of size 0",
    ),
    "foreign-pickle": (
        "RuntimeError: Invalid protocol version: 1002",
        "RuntimeError: Invalid magic number; corrupt file?",
    ),
    "plain-pickle-load": ("AttributeError: 'int' object has no attribute 'items'; got 119547037146038801333356",),
    "safetensors-cut": (
        "The safetensors file is incomplete. Check the file size and make sure you have copied/downloaded it"
        " correctly.",
        "SafetensorError: Error while deserializing header: invalid header length",
        "SafetensorError: Error while deserializing header: invalid shape, data type, or offset for tensor",
        "SafetensorError: Error while deserializing header: TensorInvalidInfo",
        'safetensors_rust.SafetensorError: Error while deserializing header: InvalidOffset("weight")',
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully"
        " covered",
    ),
    "no-safetensors": (
        "huggingface_hub.errors.SafetensorsParsingError: Failed to parse safetensors header for"
        " 'model.safetensors' (repo 'x')",
        "The safetensors file is corrupt or invalid. Make sure this is actually a safetensors file and not a ckpt or"
        " pt.",
        "safetensors_rust.SafetensorError: Error while deserializing header: invalid JSON in header: expected"
        " value at line 1",
        "invalid UTF-8 in header",
        "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
        "safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooSmall",
    ),
    "no-such-file": (
        "OSError: Model file not found: /ckpt/checkpoint_last.pt",
        "ValueError: The path out/last.ckpt does not point to a valid checkpoint. Make sure the path points to either a"
        " directory with FSDP checkpoint shards, or a single file with a full checkpoint.",
        "OSError: Repo id must use alphanumeric chars, '-', '_' or '.'. The maximum length is 96: './nowhere'.",
        "OSError: meta-llama/Llama-4 does not appear to have files named ('model-00002-of-00050.safetensors',"
        " 'model-00003-of-00050.safetensors').",
        "ValueError: No checkpoints in the directory: '/logs/rsl_rl/reach' match 'model.pth'.",
        "RuntimeError: Cannot find any model weights with `/models/x`",
        "ValueError: No supported config format found in ./out.",
        "EntryNotFoundError: 404 Client Error. Entry Not Found for url:"
        " https://huggingface.co/x/resolve/main/model.bin.",
        "OSError: pretrained/beit_large_patch16_224_pt22k_ft22k.pth is not a checkpoint file",
        "FileNotFoundError: Could not find 'policy_preprocessor.json' on the HuggingFace Hub at 'lerobot/act_aloha'",
        "RuntimeError: unable to open file </root/model/pytorch_model.bin> in read-only mode: No such file or directory"
        " (2)",
        "AssertionError: Checkpoint /x/model.pth not found!",
        "ValueError: Error: the file /x/model.zip could not be found",
        "RuntimeError: No checkpoint found in work_dirs/x",
        "FileNotFoundError: Checkpoint file not found: last.ckpt",
        "ValueError: out is not a folder containing a `.index.json` file"
        " or a pytorch_model.bin or a model.safetensors file",
        "FileNotFoundError: [Errno 2] Datei oder Verzeichnis nicht gefunden: 'model.pth'",
        "FileNotFoundError: [WinError 2] Das System kann die angegebene Datei nicht finden: 'C:\\\\runs\\\\model.pth'",
        "FileNotFoundError: No such file or directory: /models/model.safetensors",
        "OSError: ./bert is not a local folder and is not a valid model identifier listed on 'https://huggingface.co"
        "/models'",
        "RuntimeError: file model.pt cannot be opened",
        "OSError: Error no file named pytorch_model.bin, model.safetensors, tf_model.h5 found in directory ./bert.",
        "OSError: ./bert does not appear to have a file named config.json. Checkout 'https://huggingface.co/./bert/m"
        "ain'",
        "RuntimeError: open file failed because of errno 2 on fopen: No such file or directory, file path: a.pt",
        "FileNotFoundError: No checkpoint found at 'model.pth.tar'",
        "ValueError: Can't find a valid checkpoint at out/checkpoint-500",
        "ValueError: No valid checkpoint found in output directory (out)",
        "ValueError: Can't find a checkpoint index (pytorch_model.bin.index.json or model.safetensors.ind"
        "ex.json) in out.",
        "RuntimeError: No suitable checkpoints found in out.",
        "ValueError: Can't find weights for out in out or in the Hugging Face Hub. Please check that the "
        "file adapter_model.bin or adapter_model.safetensors is present at out.",
        "ValueError: adapter model file not found in out. Make sure you are passing the correct path to t"
        "he adapter model.",
        "OSError: Can't load the model for 'out'. If you were trying to load it from 'https://huggingface"
        ".co/models', make sure you don't have a local directory with the same name.",
        "ValueError: `checkpoint` should be the path to a file containing a whole state dict, or the inde"
        "x of a sharded checkpoint, or a folder containing a sharded checkpoint or the whole state dict, "
        "but got out.",
        "ValueError: The provided filename model.pt does not exist",
        "ValueError: The provided filename out is a directory",
        "RuntimeError: Pretrained value 'x.pt' is not a known tag or valid file path",
        "ValueError: The path 'ckpt' does not point to a valid checkpoint. Make sure the path points to e"
        "ither a directory with FSDP checkpoint shards, or a single file with a full checkpoint.",
        "[WARNING] Client provided checkpoint load path: ckpt does not exist ... skip checkpoint load",
        "FileNotFoundError: checkpoints/faster_rcnn.pth can not be found.",
        "FileNotFoundError: File not found: models/7B/model.pth",
        "Value not in list: ckpt_name: 'flux1-dev-fp8.safetensors' not in ['wan_2.1_vae.safetensors']",
        "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': './out/checkpoint-10'.",
    ),
    "no-such-folder": (
        "RuntimeError: [enforce fail at inline_container.cc:747] . open file failed with strerror: No such"
        " file or directory",
        "RuntimeError: Parent directory /runs/exp1 does not exist.",
    ),
    "disk-full": (
        "OSError: [Errno 28] Aucun espace disponible sur le périphérique",
        "OSError: [WinError 112] Es steht nicht genug Speicherplatz zur Verfügung",
        "OSError: [Errno 122] Disk quota exceeded",
        "RuntimeError: basic_ios::clear: iostream error",
        "RuntimeError: [enforce fail at inline_container.cc:595] . unexpected pos 64 vs 0",
        "RuntimeError: [enforce fail at inline_container.cc:778] . PytorchStreamWriter failed writing file data/12:"
        " file write failed",
    ),
    "not-seekable": ("ModuleAttributeError: 'LitNet' object has no attribute 'seek'",),
    "opened-as-text": ("UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 64: invalid start byte",),
    "wrong-hash": (
        "RuntimeError: Model has been downloaded but the SHA256 checksum does not not match. Please retry loading"
        " the model.",
    ),
    "no-permission": (
        "IsADirectoryError: [Errno 21] Is a directory: 'checkpoints'",
        "OSError: [Errno 30] Read-only file system: '/kaggle/input/model.pth'",
        "PermissionError: [Errno 13] Keine Berechtigung: '/root/.cache/huggingface/hub'",
        "PermissionError: [Errno 13] Permission denied: 'model.pth'",
        "safetensors_rust.SafetensorError: Error while serializing: I/O error: Permission denied (os error 13)",
        "RuntimeError: Parent directory /kaggle/input is not writable.",
    ),
    "file-newer-than-torch": (
        "AttributeError: module 'torch._utils' has no attribute '_rebuild_xla_tensor'",
        "AttributeError: 'module' object has no attribute '_rebuild_parameter'",
        "TypeError: _rebuild_tensor_v2() takes from 6 to 7 positional arguments but 8 were given",
        "AttributeError: Can't get attribute '_rebuild_wrapper_subclass' on <module 'torch._utils' from '/x.py'>",
        "RuntimeError: model.pth is a zip archive (did you mean to use torch.jit.load()?)",
        "AttributeError: Can't get attribute '_rebuild_parameter' on <module 'torch._utils' from 'torch/_utils.py'>",
        "AttributeError: Can't get attribute '_rebuild_tensor_v2' on <module 'torch._utils' from 'torch/_utils.py'>",
    ),
    "torch-too-old-to-load": (),
    "no-mmap-here": ("RuntimeError: unable to mmap 1024 bytes from file <model.safetensors>: No such device (19)",),
    "mmap-of-old-file": ("ValueError: f must be a file path in order to use the mmap argument",),
    "old-numpy": (
        "ModuleNotFoundError: No module named 'numpy.core.multiarray'",
        "ModuleNotFoundError: No module named 'numpy._core.multiarray'; 'numpy._core' is not a package",
    ),
    "python-2-pickle": (
        "UnicodeDecodeError: 'ascii' codec can't decode byte 0xd7 in position 1: ordinal not in range(128)",
    ),
    "newer-pickle-protocol": (
        "_pickle.UnpicklingError: Weights only load failed. Unsupported operand 149",
        "UserWarning: Detected pickle protocol 4 in the checkpoint, which was not the default pickle prot"
        "ocol used by `torch.load` (2). The weights_only Unpickler might not support all instructions imp"
        "lemented by this protocol",
    ),
    "old-whole-model": (
        "AttributeError: 'LSTM' object has no attribute '_flat_weights'",
        "AttributeError: 'GELU' object has no attribute 'approximate'",
        "AttributeError: 'Detect' object has no attribute 'grid'",
        "AttributeError: 'Conv2d' object has no attribute '_padding_repeated_twice'",
        "torch.nn.modules.module.ModuleAttributeError: 'BatchNorm2d' object has no attribute 'num_batches_tracked'",
    ),
    "zero-dim": (
        "TypeError: iteration over a 0-d tensor",
        "TypeError: len() of a 0-d tensor",
        "IndexError: invalid index of a 0-dim tensor. Use tensor.item() to convert a 0-dim tensor to a Python number",
    ),
    "gone-from-torch": (
        "AttributeError: module 'numpy' has no attribute 'bool'",
        "ImportError: cannot import name 'container_abcs' from 'torch._six'",
        "ImportError: cannot import name 'load_state_dict_from_url' from 'torchvision.models.utils'",
        "ModuleNotFoundError: No module named 'torchvision.models.utils'",
    ),
    "no-torchscript": (
        "RuntimeError: [enforce fail at inline_container.cc:222] . file not found: archive/constants.pkl",
    ),
    "torchscript": (
        "UserWarning: 'torch.load' received a zip file that looks like a TorchScript archive dispatching to"
        " 'torch.jit.load' (call 'torch.jit.load' directly to silence this warning)",
        "AttributeError: 'RecursiveScriptModule' object has no attribute 'copy'",
    ),
    "missing-record": (
        "RuntimeError: PytorchStreamReader failed locating file data.pkl: file not found",
        "RuntimeError: [enforce fail at inline_container.cc:222] . file not found: model/version",
        'RuntimeError: Expected hasRecord("version") to be true, but got false.  (Could this error message be improved?'
        "  If so, please report an enhancement request to PyTorch.)",
    ),
    "distributed-missing-key": (
        "ValueError: Could not find FQN: 'model.a'",
        "ValueError: FQN: 'model.a' is not a ShardedTensor, can't find by offset: 'torch.Size([0])'",
        "CheckpointingException: Object shard ShardedObject(key='decoder.core_attention._extra_state',"
        " global_shape=(32,)) not found",
        "ValueError: Could not find shard at 'torch.Size([0, 0])' for FQN: 'model.fc.weight'",
        "KeyError: \"optimizer.state.exp_avg.decoder.final_layernorm.weight from model not in state dict: ['args']\"",
        "ValueError: Invalid checkpoint metadata for opt.param_groups.0.lr, expected BytesStorageMetadata but found"
        " <class"
        " 'torch.distributed.checkpoint.metadata.TensorStorageMetadata'>",
        "AssertionError: metadata is None",
    ),
    "sharded-checkpoint": (
        "ValueError: zero_pp_rank_0_mp_rank_00_optim_states.pt is not a zero checkpoint",
        "ValueError: unknown zero stage 1",
        "_pickle.UnpicklingError: Weights only load failed. ``torch.distributed.tensor`` must be imported to"
        " load DTensors",
        "ValueError: consumed 10 numels out of 20 - something is wrong",
        "RuntimeError: DeepSpeed was unable to load the checkpoint. Ensure you passed in a DeepSpeed comp"
        "atible checkpoint or a single checkpoint file by setting `DeepSpeedStrategy(..., load_full_weigh"
        "ts=True)`.",
        "ValueError: Checkpoint found at out/checkpoint-5 is only supported when using PyTorch FSDP",
        "RuntimeError: layers.0._flat_param contains _flat_param. This can happen if the model is not the root module.",
        "RuntimeError: Global world size at save time was 8, but at load time was 1",
        "CheckpointingException: Global shape mismatch for loaded (torch.Size([8, 4]))"
        " and expected ((4, 4)) tensor for key decoder.layers.mlp.linear_fc1.weight",
        "tensor_model_parallel_size value from checkpoint (2) is not equal to the input argument value (1).",
        "FileNotFoundError: Config file ckpt/actor/fsdp_config.json does not exist.",
        "AssertionError: Unsupported mesh_dim_names ('fsdp', 'tp')",
        "NotImplementedError: FSDP + TP is not supported yet",
        "ValueError: Non-DTensor entry 'rotary.inv_freq' differs between rank 0 and rank 3; expected a replicated"
        " buffer/parameter identical on every rank",
        "ValueError: Tried to load from out/checkpoint-5 but couldn't find a valid metadata file. However, potential"
        " model and optimizer checkpoint directories exist.",
        "RuntimeError: torch function '__get__', with args: (ShardedTensor(...),) and kwargs: None not"
        " supported for ShardedTensor!",
        "RuntimeError: .numpy() is not supported for tensor subclasses.",
        "AssertionError: checkpoint contains neither 'model' or 'module' keys, not sure how to proceed",
        "AssertionError: checkpoint has both 'model' and 'module' keys, not sure how to proceed",
        "AssertionError: Cannot load state dict with strict=True and checkpoint shards > 1",
        "AssertionError: Invalid sharded dir ckpt/actor",
        "ValueError: Invalid key vision.weight in Megatron state_dict. Expected keys to start with"
        " 'decoder/embedding/output_layer' in TransformerLayer.",
        "_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported global: GLOBAL"
        " torch.distributed._shard.sharded_tensor.api.ShardedTensor was not an allowed global by default.",
        "_pickle.UnpicklingError: Trying to load unsupported GLOBAL torch.distributed.tensor.DTensor whose module is"
        " not allowed",
        "AssertionError: You have to pass how the original parameters are sharded in order to resume in a different"
        " tensor parallel size, ckp_tp_size: 4, current tp_size: 2",
        "AssertionError: Invalid checkpoints and world size for sd merge",
        "NotImplementedError: zero_to_fp32 does not support AutoEP ZeRO-3 partition-native checkpoints.",
        "ValueError: Model is not sharded but checkpoint is sharded. Please pass in a model wrapped with FSDP.",
        "ValueError: Loading a sharded checkpoint requires passing an FSDP config to Trainer.",
        "FileNotFoundError: Could not determine world size. No file matching 'model_world_size_(\\d+)_rank_0.pt' found"
        " in ckpt/actor",
        "ValueError: World size not found in the config file.",
        "NotImplementedError: Partial placement is not supported yet",
        "NotImplementedError: Unsupported placement: Partial(sum)",
        "ValueError: `merge_fsdp_weights` requires PyTorch >= 2.3.0`",
        "ValueError: Require metadata for each shard and non-empty shards",
        "AssertionError: Either old MP size or new MP size should be a multiple of the other: 3 % 2 != 0 and 2 % 3 !="
        " 0",
        "ValueError: No DCP custom metadata found in safetensors file. The file must be saved with DCP to be"
        " consolidated.",
    ),
    "missing-ranks": (
        "FileNotFoundError: Expected 8 of '*_optim_states.pt' under 'x' but found 7 files."
        " Possibly due to an overwrite of an old checkpoint.",
        "RuntimeError: ZeRO-3 checkpoint model/optimizer rank sets do not match: model_only=[3], optim_only=[]",
        "RuntimeError: Missing ZeRO-3 checkpoint file for tp_rank=0, dp_rank=3",
        "FileNotFoundError: Missing ZeRO optimizer checkpoint for rank 3",
        "RuntimeError: Checkpoint model-state file count 3 does not match tp_degree=2 * pp_degree=2.",
        "RuntimeError: Checkpoint ZeRO file count 3 is not divisible by tp_degree=2 * pp_degree=1.",
        "AssertionError: checkpoint count 2 is different from saved mp_world_size 4",
        "FileNotFoundError: Expert checkpoint file not found: ckpt/layer_2_expert_2_mp_rank_00_model_states.pt."
        " Expected layer_2 expert_2.",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ckpt/global_step10/zero_pp_rank_3_mp_rank_00_optim_s"
        "tates.pt'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ckpt/global_step10/mp_rank_01_model_states.pt'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ckpt/global_step10/layer_02-model_00-model_states.pt"
        "'",
        "AssertionError: State dicts of all partitions must have the same step value",
        "AssertionError: All shards must have the same step value",
        "The following zero checkpoints paths are missing:"
        " ['out/global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt']",
        "RuntimeError: Expert checkpoint file is corrupt: key 'experts.w1' not found in ckpt/global_step10",
        "RuntimeError: Duplicate ZeRO rank (0, 1) in optim files: a.pt and b.pt",
        "RuntimeError: ZeRO-3 model/optimizer tp_degree or dp_degree mismatch: model=(1,4), optim=(1,3)",
        "AssertionError: No fragment files for tp rank 1 of a parameter whose recorded shape (4, 8) is not empty.",
        "AssertionError: Pipeline replicas of tied.weight on tp rank 0 disagree on shape: (4, 8) vs (8, 8).",
        "ValueError: Ranks (0, 1) hold different data for the same block of a replicated parameter, starting at offset"
        " 0.",
        "RuntimeError: Missing AutoEP universal fragments for moe.w1/exp_avg EP ranks: [1]",
        "RuntimeError: Incomplete AutoEP expert-DP fragments for moe.w1/exp_avg EP rank 1: got [0], expected [0, 1]",
        "RuntimeError: Missing AutoEP exp_avg fragments for moe.w1, EP rank 1.",
        "ValueError: Could not find any shards model_weight_*.safetensors in ckpt/500/model/lm_head.If you notice"
        " `.safetensors` in the middle of the name",
    ),
    "missing-shards": (
        "megatron.core.dist_checkpointing.core.CheckpointingException: Missing shards after fully parallel loading:"
        " {'decoder.layers.0.weight'}",
        "FileNotFoundError: [Errno 2] No such file or directory: 'out/step-1000/__3_0.distcp'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'iter_0001000/mp_rank_01_003/model_optim_rng.pt'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'out/model_final.rank_3.pth'",
        "OSError: Model file not found: /ckpt/checkpoint_last-shard3.pt",
    ),
    "partition-sizes": (
        "RuntimeError: The size of tensor a (882700288) must match the size of tensor b (220675072) at non-singleton"
        " dimension 0",
    ),
    "process-group-of-training": ("RuntimeError: Could not resolve the process group registered under the name 7",),
    "zero-world-size": (
        "NotImplementedError: ZeRO-3 does not yet support elastic checkpointing, please disable for now.",
        "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 2 but the current DP world"
        " size is 4. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not"
        " currently supported.",
        "AssertionError: The checkpoint being loaded used a DP world size of 2 but the current DP world size is 4.",
        "AssertionError: Empty ds_version in checkpoint, not clear how to proceed",
        "Loading fp16 zero checkpoints into bf16 training engine",
        "RuntimeError: AutoEP ZeRO-3 checkpoints can only be loaded with the same parameter placement topology in this"
        " release.",
        "KeyError: 'fp32_flat_groups'",
        "KeyError: 'single_partition_of_fp32_groups'",
        "RuntimeError: The ZeRO checkpoint parameter-alignment layout does not match the current"
        " zero_optimization.parameter_alignment setting.",
    ),
    "universal-checkpoint": (
        "ValueError: Cannot parse ZeRO-3 tp/dp ranks from checkpoint file name: rank3.pt",
        "ValueError: AutoTP universal checkpoint conversion is not supported for zero stage 3.",
        "ValueError: Invalid for universal checkpoint: ckpt/latest_universal does not exist",
        "AssertionError: Required universal_checkpoint_info state is missing in checkpoint. Verify that client"
        " creates this state.",
        "FileNotFoundError: can't find ZeRO Stage 3 model state files in directory 'ckpt/global_step10'",
        "KeyError: 'universal_checkpoint_info'",
        "AssertionError: zero/optimizer_state.pt containing optimizer global state is missing! Cannot proceed.",
        "RuntimeError: AutoEP metadata is missing from checkpoint. Cannot consolidate expert files without"
        " ds_autoep_layers metadata.",
        "RuntimeError: Folding metadata mismatch for tp_size: saved=2 runtime=4",
        "RuntimeError: Legacy checkpoint format (old_moe_load) is incompatible with AutoEP layers.",
    ),
    "universal-sizes": (
        "AssertionError: Load checkpoint fp32 dst numel 1048576 != src numel 524288",
        "AssertionError: Load checkpoint exp_avg dst numel 34603008 != src numel 17301504",
        "AssertionError: Vocab tensor padded size 32000 < loaded universal size 32128",
        "AssertionError: Loading x.weight full param numel 8192 != tensor slice numel 2048 * tp_world_size 2",
        "AssertionError: Dimension 0 of size 7 is not divisible by tp_world_size 2, and this checkpoint records no"
        " partition_sizes, so its uneven layout cannot be reconstructed.",
        "RuntimeError: Cannot restore a universal checkpoint into this AutoTP parameter: x",
    ),
    "names-of-zero": (
        "    param_shapes = state_dict[PARAM_SHAPES]\nKeyError: 'param_shapes'",
        "    frozen_param_shapes = state_dict[FROZEN_PARAM_SHAPES]\nKeyError: 'frozen_param_shapes'",
        "    buffer_names = state_dict[BUFFER_NAMES]\nKeyError: 'buffer_names'",
    ),
    "access-pattern": (
        "megatron.core.dist_checkpointing.core.CheckpointingException: Invalid access pattern for"
        " ShardedTensor(key='decoder.layers.input_layernorm.weight', dtype=torch.bfloat16, local_shape=(5120,))",
        "ERROR:megatron.core.dist_checkpointing.validation:Invalid access pattern: 60 ShardedObject are missing."
        " Existing shards: ['decoder.layers.self_attention.core_attention._extra_state/shard_0_80']",
        "CheckpointingException: Invalid sharding pattern validation. Errors: Invalid access pattern for"
        " ShardedTensor(key='decoder.final_layernorm.weight')",
    ),
    "ranks-of-another-torch": (
        "ValueError: Unable to read checkpoint metadata. The checkpoint was likely saved with a newer version of"
        " torch.",
        "ModuleNotFoundError: No module named 'torch.distributed._mesh_layout'",
        "ModuleNotFoundError: No module named 'torch.distributed.device_mesh'",
        "AttributeError: Can't get attribute 'DTensor' on <module 'torch.distributed.tensor' from"
        " '/x/torch/distributed/tensor/__init__.py'>",
        "AttributeError: Can't get attribute '_FlatLayout' on <module 'torch.distributed._mesh_layout' from '/x/y.py'>",
        "AttributeError: 'DeviceMesh' object has no attribute '_layout'",
        "AttributeError: 'DTensorSpec' object has no attribute 'shard_order'",
    ),
    "fsdp-state-dict-type": (
        "RuntimeError: load_sharded_state_dict can only be called when parameters are flattened and sharded.",
        "RuntimeError: ``local_state_dict`` can only be used when parameters are flatten and sharded.",
        "AttributeError: 'Tensor' object has no attribute 'local_shards'",
        "AssertionError: FSDP assumes x.weight is in the state_dict but the state_dict only has"
        " odict_keys(['a.weight']). prefix=, module_name=fc",
        "RuntimeError: No `FlatParameter` in `state_dict` for this FSDP instance but it has parameters",
        "AssertionError: Tensors in local_state_dict should be ShardedTensor.",
        "AssertionError: Local shard size = 12 and the tensor in the state_dict is 24.",
        "AssertionError: Expects 0 or 1 shard per rank but got 2 shards on rank 0.",
        "RuntimeError: Number of local shards (1) does not match number of local shards metadata in"
        " sharded_tensor_metadata (0) on rank (1)",
        "RuntimeError: inplace copy can only happen between two ShardedTensor with same metadata!",
        "RuntimeError: Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with"
        " LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict.",
        "KeyError: 'fc.weight is not in the optimizer state. The FSDPParamInfo has the param keys [] while",
    ),
    "no-distributed-checkpoint": (
        "FileNotFoundError: [Errno 2] No such file or directory: 'out/step-1000/.metadata'",
        "FileNotFoundError: [Errno 2] No such file or directory: '.metadata'",
        "AssertionError: req MetadataIndex(fqn='a', offset=torch.Size([0]), index=0) mismatch sizes, torch.Size([1]) vs"
        " torch.Size([2])",
        "ValueError: Could not find FSDP checkpoint `pytorch_model_fsdp_0` in out",
        "FileNotFoundError: --checkpoint.load_step=1000 not found at outputs/checkpoint/step-1000",
        "megatron.core.dist_checkpointing.core.CheckpointingException: Checkpoint directory ckpt/iter_0001000 does not"
        " exist",
        "megatron.core.dist_checkpointing.core.CheckpointingException: Cannot find a default strategy for: ('zarr', 1)",
        "RuntimeError: Cannot detect which StorageReader or StorageWriter to use. Please specify the"
        " storage_reader/storage_writer.",
        "FileNotFoundError: Megatron-FSDP checkpoint metadata not found at ckpt/.metadata.",
        "megatron.core.dist_checkpointing.core.CheckpointingException: ckpt/iter_0001000 is not a distributed"
        " checkpoint",
        "FileNotFoundError: '/workspace/OLMo-2/step1907359' is not a distributed checkpoint folder.",
        "Only FSDP-sharded checkpoints saved with Lightning are supported for consolidation. The provided"
        " folder is not in that format: out/last.ckpt",
        "KeyError: MetadataIndex(fqn='module.decoder.layers.self_attention.linear_qkv.layer_norm_weight',"
        " offset=torch.Size([2, 0]), index=24)",
        "AssertionError: req MetadataIndex(fqn='model.fc.weight', offset=torch.Size([0, 0]), index=0) mismatch"
        " sizes torch.Size([4, 8]) vs torch.Size([2, 8])",
    ),
    "no-tracker-of-megatron": (
        "WARNING: could not find the metadata file /root/data/checkpoints/blocklm/latest_checkpointed_iteration.txt",
        "ERROR: Invalid metadata file ckpt/latest_checkpointed_iteration.txt. Exiting",
        "AssertionError: error parsing metadata file ckpt/latest_checkpointed_iteration.txt",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ckpt/latest_checkpointed_iteration.txt'",
        "ValueError: could not find the metadata file ckpt/glm-130b-sat/49300/latest, please check --load",
    ),
    "no-pre-sharded-files": (),
    "no-files-of-llama": ("AssertionError: Checkpoint directory 'Meta-Llama-3-8B' does not exist.",),
    "parts-of-llama": ("AssertionError: Loading a checkpoint for MP=2 but world size is 1",),
    "no-files-of-zero": (
        "FileNotFoundError: can't find *_optim_states.pt files in directory 'x'",
        "FileNotFoundError: can't find mp_rank_ files in directory 'ckpt/global_step10'",
        "FileNotFoundError: can't find model states file at 'ckpt/mp_rank_00_model_states.pt'",
        "FileNotFoundError: The provided path is not a valid DeepSpeed checkpoint: x",
        "The directory x is not a DeepSpeed checkpoint",
        "AssertionError: ckpt seems a bogus DeepSpeed checkpoint folder: Cannot find mp_rank_* files in there.",
        "AssertionError: No ZeRO files found in ckpt/global_step100",
        "AssertionError: could not find any zero files",
        "FileNotFoundError: Directory 'out/global_step10' doesn't exist",
    ),
    "format-of-megatron": (
        "RuntimeError: Detected deprecated Megatron checkpoint layout (dist_ckpt).",
        "RuntimeError: Detected load from a distributed checkpoint, but neither --use-dist-ckpt nor"
        " --auto-detect-ckpt-format is set.",
        "ValueError: Unrecognized checkpoint format at ckpt/iter_0000100",
        "NotImplementedError: unknown checkpoint format in ckpt/iter_0000100",
        "NotImplementedError: checkpoint format zarr not supported",
        "ValueError: ckpt/iter_0000100 is not a MLM or NeMo sharded checkpoint!",
        "AssertionError: Checkpoint format 'torch_dist' from config differs from inferred format 'fsdp_dtensor' for"
        " ckpt.",
    ),
    "optimizer-of-megatron": (
        "AssertionError: Number of unpadded elements must be same in current run (45) and checkpoint (90)",
        "ValueError: Optimizer 'adam': checkpoint has 4 param_groups but current optimizer has 2",
        "ValueError: Could not find parameter group with key (1.0, 1.0) in loaded checkpoint. Available keys: []",
        "ValueError: Param id 12 does not match any model sharded param",
        "RuntimeError: Fully parallel load is not supported for dp_zero_gather_scatter checkpoints. Please remove"
        " --ckpt-fully-parallel-load flag",
    ),
    "integrity-of-megatron": (),
    "dtensors-and-tensors": (
        "AttributeError: 'Tensor' object has no attribute '_local_tensor'",
        "AttributeError: 'Parameter' object has no attribute 'full_tensor'",
        "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed"
        " operators!",
    ),
    "lightning-version": (),
    "transformers-wrapper": (),
    "safetensors-without-format": (
        "The safetensors archive passed at model.safetensors does not contain metadata. Make sure to save"
        " your model with the `save_pretrained` method. Defaulting to 'pt' metadata.",
    ),
    "shared-tensors": (
        "ValueError: You are trying to save a sparse tensors: `['w']` which this library does not support.",
        "RuntimeError: The weights trying to be saved contained shared tensors [{'lm_head.weight',"
        " 'model.embed_tokens.weight'}] that are mismatching the transformers base configuration.",
        "ValueError: You are trying to save a non contiguous tensor: `fc.weight` which is not allowed.",
        "RuntimeError: Error while trying to find names to remove to save state dict, but found no suitab"
        "le name to keep for saving amongst: {'a.weight'}. None is covering the entire storage.Refusing t"
        "o save/load the model since you could be storing much more memory than needed.",
    ),
    "unknown-timm-model": (
        "RuntimeError: Invalid pretrained tag (foo) for resnet50",
        "RuntimeError: No pretrained weights exist for foo. Use `pretrained=False` for random init.",
    ),
    "device-tag": (
        "RuntimeError: torch.UntypedStorage(): Storage device not recognized: mps",
        "RuntimeError: Attempting to deserialize object on MPS device 0 but torch.mps.device_count() is 0. ",
        "RuntimeError: Attempting to deserialize object on CUDA device 2 but torch.cuda.device_count() is 1."
        " Please use torch.load with map_location to map your storages to an existing device.",
        "RuntimeError: don't know how to restore data location of torch.FloatStorage (tagged with xla:0)",
        "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage (tagged with mps)",
        "RuntimeError: Attempting to deserialize object on a HPU device but torch.hpu.is_available() is False.",
        "RuntimeError: The HPU device module is not registered. If you are running on a CPU-only machine, please"
        " use torch.load with map_location=torch.device('cpu') to map your storages to the CPU.",
        "safetensors_rust.SafetensorError: device cuda:3 is invalid",
    ),
    "no-cuda-build": (
        "AttributeError: module 'torch._C' has no attribute '_cuda_getDevice'",
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
    ),
    "no-gpu": (
        "RuntimeError: cuda runtime error (38) : no CUDA-capable device is detected at torch/csrc/cuda/Module.cpp:51",
        "RuntimeError: cuda runtime error (10) : invalid device ordinal at torch/csrc/cuda/Module.cpp:32",
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed"
        " a driver",
        "RuntimeError: CUDA error: invalid device ordinal",
        "AssertionError: Invalid device id",
    ),
    "old-driver": (
        "RuntimeError: cuda runtime error (35) : CUDA driver version is insufficient for CUDA runtime version"
        " at /pytorch/aten/src/THC/THCGeneral.cpp:51",
    ),
    "no-kernel-image": (
        "NVIDIA GeForce RTX 3090 with CUDA capability sm_86 is not compatible with the current PyTorch installation.",
        "RuntimeError: cuda runtime error (48) : no kernel image is available for execution on the device at"
        " /pytorch/aten/src/THC/THCTensorCopy.cu:206",
    ),
    "device-mismatch": (
        "TypeError: add_ received an invalid combination of arguments - got (float, torch.cuda.FloatTensor), but"
        " expected one"
        " of:\n * (float value)\n * (torch.FloatTensor other)",
        "RuntimeError: Input type (MPSFloatType) and weight type (torch.FloatTensor) should be the same",
        "RuntimeError: Expected object of type torch.cuda.FloatTensor but found type torch.FloatTensor for argument"
        " #3 'other'",
        "RuntimeError: Input and parameter tensors are not at the same device, found input tensor at cpu and"
        " parameter tensor at cuda:0",
        "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
        "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
        "RuntimeError: Input type (CUDAFloatType) and weight type (CPUFloatType) should be the same",
        "RuntimeError: Input type (torch.FloatTensor) and weight type (MPSFloatType) should be the same",
        "TypeError: expected CPU tensor (got CUDA tensor)",
        "RuntimeError: Expected object of backend CPU but got backend CUDA for argument #2 'weight'",
        "RuntimeError: Expected object of device type cuda but got device type cpu for argument #1 'self' in"
        " call to _th_mm",
        "RuntimeError: Expected object of type torch.FloatTensor but found type torch.cuda.FloatTensor for argument"
        " #2 'weight'",
        "RuntimeError: Placeholder storage has not been allocated on MPS device!",
        "RuntimeError: Input, output and indices must be on the current device",
        "RuntimeError: Tensors of the same index must be on the same device and the same dtype except `step` tensors",
    ),
    "data-parallel-device": (
        "RuntimeError: all tensors must be on devices[0]",
        "RuntimeError: module must have its parameters and buffers on device cuda:1 (device_ids[0]) but found"
        " one of them on device: cuda:0",
    ),
    "not-for-numpy": (
        "TypeError: Got unsupported ScalarType BFloat16",
        "TypeError: Got unsupported ScalarType Float8_e4m3fn",
        "TypeError: can't convert CUDA tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.",
        "RuntimeError: Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.",
    ),
    "meta-tensor": (
        "RuntimeError: Attempted to set the storage of a tensor on device 'cpu' to a storage on different device"
        " 'meta'.  This is no longer allowed; the devices must match.",
        "RuntimeError: Tensor on device cpu is not on the expected device meta!",
        "RuntimeError: Tensor on device meta is not on the expected device cuda:0!",
        "UserWarning: for fc.weight: copying from a non-meta parameter in the checkpoint to a meta parame"
        "ter in the current model, which is a no-op. (Did you mean to pass `assign=True` to assign items "
        "in the state dictionary to their corresponding key in the module instead of copying them in plac"
        "e?)",
        "ValueError: weight is on the meta device, we need a `value` to put in on cuda:0.",
    ),
    "cuda-after-fork": (),
    "dtype-mismatch": (
        "RuntimeError: Promotion for Float8 Types is not supported, attempted to promote BFloat16 and Float8_e4m3fn",
        "RuntimeError: Input type (CUDAHalfType) and weight type (CUDAFloatType) should be the same",
        "RuntimeError: Input type (CPUDoubleType) and weight type (CPUFloatType) should be the same",
        "RuntimeError: Input type (MPSHalfType) and weight type (MPSFloatType) should be the same",
        "RuntimeError: Expected object of type torch.cuda.HalfTensor but found type torch.cuda.FloatTensor for"
        " argument #2",
        "ValueError: Attempting to unscale FP16 gradients.",
        "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same",
        "RuntimeError: Input type (torch.DoubleTensor) and weight type (torch.FloatTensor) should be the same",
        "RuntimeError: Input type (double) and bias type (float) should be the same",
        "RuntimeError: Input type (float) and bias type (c10::Half) should be the same",
        "RuntimeError: Input type (unsigned char) and bias type (float) should be the same",
        "RuntimeError: Expected object of scalar type Float but got scalar type Double for argument #2 'mat2'"
        " in call to _th_mm",
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float",
        "RuntimeError: mat1 and mat2 must have the same dtype",
        "RuntimeError: Found dtype Double but expected Float",
        "ValueError: input must have the type torch.float32, got type torch.float64",
        "ValueError: RNN input dtype (torch.float64) does not match weight dtype (torch.float32).",
        "RuntimeError: Expected object of type torch.FloatTensor but found type torch.DoubleTensor for argument"
        " #2 'weight'",
        "TypeError: expected Float tensor (got Double tensor)",
        "RuntimeError: expected m1 and m2 to have the same dtype, but got: double != float",
        "ValueError: FlatParameter requires uniform dtype but got torch.bfloat16 and torch.float32",
    ),
    "half-on-cpu": (
        "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
        "RuntimeError: \"LayerNormKernelImpl\" not implemented for 'Half'",
    ),
    "no-operator-for-type": (
        "RuntimeError: expected target dtype to be Long or Byte, but got Int",
        "RuntimeError: expected floating point type for target with class probabilities, got Long",
        "RuntimeError: Expected tensor for argument #1 'indices' to have one of the following scalar types:"
        " Long, Int; but got torch.FloatTensor instead (while checking arguments for embedding)",
        "RuntimeError: \"upsample_bilinear2d_channels_last\" not implemented for 'Long'",
    ),
    "half-overflow": ("RuntimeError: value cannot be converted to type c10::Half without overflow",),
    "float64-on-mps": ("TypeError: Trying to convert Float8_e4m3fn to the MPS backend but it does not support it.",),
    "device-assert": (
        "RuntimeError: cuda runtime error (59) : device-side assert triggered at /pytorch/aten/src/THC/generic/THCTe"
        "nsorMath.cu:24",
        "/pytorch/aten/src/THCUNN/ClassNLLCriterion.cu:105: void cunn_ClassNLLCriterion_updateOutput_kernel:"
        " block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.",
    ),
    "illegal-access": (
        "RuntimeError: cuda runtime error (77) : an illegal memory access was encountered at /pytorch/aten/src/THC/T"
        "HCCachingHostAllocator.cpp:265",
        "RuntimeError: CUDA error: unspecified launch failure",
    ),
    "cuda-library": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k,"
        " &alpha, a, lda, b, ldb, &beta, c, ldc)`",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (8, 9, 2) but found runtime"
        " version (8, 5, 0).",
        "RuntimeError: CUDNN_STATUS_EXECUTION_FAILED",
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
    ),
    "extension-out-of-date": (
        "ModuleNotFoundError: No module named 'torch.utils.ffi'",
        "ImportError: torch.utils.ffi is deprecated. Please use cpp extensions instead.",
        "error: 'THCudaMalloc' was not declared in this scope",
        'lib/nms.cpp:4:35: error: identifier "AT_CHECK" is undefined',
        "src/nms_cuda.c:1:10: fatal error: THC/THC.h: No such file or directory",
        'error: identifier "THCState" is undefined',
        'error: no suitable conversion function from "const at::DeprecatedTypeProperties" to "c10::ScalarType" exists',
    ),
    "extension-of-other-torch": (
        "ImportError: /ops/_ext.so: undefined symbol: THPVariableClass",
        "ImportError: /opt/apex/amp_C.cpython-38-x86_64-linux-gnu.so: undefined symbol: _ZN3c1011CPUTensorIdEv",
    ),
    "torchvision-of-other-torch": (
        "RuntimeError: Detected that PyTorch and torchvision were compiled with different CUDA major versions.",
        "OSError: libc10_cuda.so: cannot open shared object file: No such file or directory",
        "ModuleNotFoundError: No module named 'torchvision._C'",
        "RuntimeError: Unknown builtin op: torchvision::nms.",
        "AttributeError: '_OpNamespace' 'torchvision' object has no attribute 'nms'",
        "NotImplementedError: Could not run 'torchvision::nms' with arguments from the 'CUDA' backend.",
        "AttributeError: module 'torchvision' has no attribute 'nms'",
        "RuntimeError: Couldn't load custom C++ ops. This can happen if your PyTorch and torchvision versions"
        " are incompatible",
    ),
    "gpu-memory": (
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 3.95 GiB total capacity; 3.40"
        " GiB already allocated; 3.31 MiB free; 3.42 GiB reserved in total by PyTorch)",
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: MPS backend out of memory (MPS allocated: 18.04 GB, other allocations: 94.99 MB, max"
        " allowed: 18.13 GB).",
    ),
    "machine-memory": (
        "OSError: [Errno 12] Speicher kann nicht zugewiesen werden",
        "safetensors_rust.SafetensorError: Error while deserializing: I/O error: Cannot allocate memory (os error 12)",
        "RuntimeError: unable to mmap 4976698672 bytes from file <model-00001-of-00002.safetensors>: Cannot allocate"
        " memory (12)",
        "OSError: The paging file is too small for this operation to complete. (os error 1455)",
        "RuntimeError: $ Torch: not enough memory: you tried to allocate 2GB. Buy new RAM! at"
        " /pytorch/aten/src/TH/THGeneral.cpp:201",
        "OSError: [Errno 12] Cannot allocate memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "RuntimeError: [enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:81] data. DefaultCPUAllocator: not"
        " enough memory: you tried to allocate 1048576000 bytes.",
        "MemoryError",
    ),
    "shared-memory": (
        "OSError: [Errno 24] Zu viele offene Dateien",
        "OSError: [Errno 28] No space left on device: '/dev/shm/torch_123_456'",
        "RuntimeError: unable to write to file </torch_18692_1954506624>: No space left on device (28)",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: unable to open shared memory object </torch_2345_99> in read-write mode",
        "RuntimeError: received 0 items of ancdata",
        "OSError: [Errno 24] Too many open files",
    ),
    "worker-died": ("RuntimeError: DataLoader worker (pid 2341) is killed by signal: Killed.",),
    "batchnorm-one-value": (
        "ValueError: Expected more than 1 value per channel when training, got input size [1, 512]",
    ),
    "input-channels": (
        "RuntimeError: Given groups=1, weight[64, 3, 7, 7], so expected input[1, 1, 224, 224] to have 3 channels,"
        " but got 1 channels instead",
    ),
    "input-dimensions": (
        "ValueError: expected 2D or 3D input (got 4D input)",
        "RuntimeError: Expected 4-dimensional input for 4-dimensional weight [64, 3, 7, 7], but got 3-dimensional"
        " input of size [3, 224, 224] instead",
        "ValueError: expected 4D input (got 2D input)",
    ),
    "matrix-shapes": (
        "RuntimeError: mat1 dim 1 must match mat2 dim 0",
        "RuntimeError: size mismatch, m1: [1 x 2048], m2: [512 x 10] at /pytorch/aten/src/TH/generic/THTensorMath.cp"
        "p:752",
        "RuntimeError: Given normalized_shape=[768], expected input with shape [*, 768], but got input of size[1,"
        " 197, 1024]",
        "RuntimeError: running_mean should contain 64 elements not 128",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x2048 and 1024x10)",
    ),
    "index-out-of-range": (
        "RuntimeError: index out of range at /pytorch/aten/src/TH/generic/THTensorEvenMoreMath.cpp:193",
    ),
    "label-out-of-range": ("IndexError: Target -1 is out of bounds.",),
    "negative-strides": (
        "ValueError: some of the strides of a given numpy array are negative. This is currently not supported,"
        " but will be added in future releases.",
    ),
    "view-of-strided": (
        "RuntimeError: input is not contiguous",
        "RuntimeError: invalid argument 2: view size is not compatible with input tensor's size and stride (at"
        " least one dimension spans across two contiguous subspaces). Call .contiguous() before .view().",
    ),
    "nan": (
        "RuntimeError: normal expects all elements of std >= 0.0",
        "ValueError: Expected parameter loc of distribution Normal to satisfy the constraint Real(), but found"
        " invalid values:\ntensor([[nan, nan]])",
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1.9e-05, 'epoch': 0.01}",
        "AssertionError: nan or inf found in input tensor.",
        "FloatingPointError: Model diverged with loss = NaN",
        "Epoch: [3][120/5005] Loss: nan (nan) Acc@1 0.10",
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        "NansException: A tensor with all NaNs was produced in VAE. This could be because there's not enough precision",
    ),
    "capturable": (),
    "older-pickle-protocol": (
        "_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6, we changed the default value."
        " WeightsUnpickler error: Unsupported operand 111",
    ),
    "zip-around": (),
    "argument-of-newer-torch": (
        "TypeError: 'weights_only' is an invalid keyword argument for this function",
        "TypeError: load() got an unexpected keyword argument 'mmap'",
        "TypeError: load_state_dict() got an unexpected keyword argument 'assign'",
        "TypeError: Module.load_state_dict() got an unexpected keyword argument 'assign'",
    ),
    "no-backend": (
        "RuntimeError: PyTorch is not linked with support for mps devices",
        "RuntimeError: Could not run 'aten::empty_strided' with arguments from the 'CUDA' backend. This"
        " could be because the operator doesn't exist for this backend",
        "NotImplementedError: The operator 'aten::_upsample_bicubic2d_aa.out' is not currently implemented for"
        " the MPS device.",
    ),
    "quantised-and-not": (
        "NotImplementedError: Could not run 'aten::thnn_conv2d' with arguments from the 'QuantizedCPU' backend.",
    ),
    "attribute-of-wrapper": (
        "AttributeError: 'DistributedDataParallel' object has no attribute 'fc'",
        "torch.nn.modules.module.ModuleAttributeError: 'DataParallel' object has no attribute 'features'",
    ),
    "no-wrapper": (
        "torch.nn.modules.module.ModuleAttributeError: 'MobileNetV2' object has no attribute 'module'",
        "AttributeError: 'GPT' object has no attribute '_orig_mod'",
    ),
    "operator-of-torchscript": ("RuntimeError: \nUnknown builtin op: aten::scaled_dot_product_attention.",),
    "no-arithmetic-in-float8": ("NotImplementedError: \"sum_cpu\" not implemented for 'Float8_e5m2'",),
    "no-process-group": (
        "RuntimeError: Need to initialize default process group using `init_process_group` before loading ShardedTen"
        "sor",
        "RuntimeError: Default process group has not been initialized, please make sure to call init_process_group.",
    ),
    "safetensors-takes-tensors": (
        "ValueError: Key `optimizer` is invalid, expected torch.Tensor but received <class 'dict'>",
        "TypeError: argument 'metadata': 'int' object cannot be converted to 'PyString'",
        "TypeError: argument 'metadata': 'int' object is not an instance of 'str'",
    ),
    "scheduler-before-optimizer": (
        "KeyError: \"param 'initial_lr' is not specified in param_groups[0] when resuming scheduler with"
        ' last_epoch >= 0."',
        "KeyError: 'initial_lr'",
    ),
    "unequal-sizes": (
        "RuntimeError: The size of tensor a (8) must match the size of tensor b (7) at non-singleton dimension 3",
        "RuntimeError: The expanded size of the tensor (600) must match the existing size (512) at non-singleton"
        " dimension 1.  Target sizes: [2, 600].  Tensor sizes: [1, 512]",
    ),
    "forward-arguments": (
        "TypeError: forward() missing 1 required positional argument: 'target'",
        "TypeError: Net.forward() missing 3 required positional arguments: 'a', 'b', and 'c'",
        "TypeError: Net.forward() missing 1 required keyword-only argument: 'x'",
        "TypeError: BertModel.forward() got an unexpected keyword argument 'labels'",
        "TypeError: Net.forward() got multiple values for argument 'x'",
        "TypeError: Net.forward() takes 2 positional arguments but 3 were given",
    ),
    "process-crashed": (
        "the process crashed with SIGSEGV",
        "the process crashed with SIGBUS",
        "Fatal Python error: Segmentation fault",
        "traceback : Signal 11 (SIGSEGV) received by PID 4242",
    ),
    "process-killed": (
        "the process was killed by SIGKILL, most likely because it ran out of memory",
        "traceback : Signal 9 (SIGKILL) received by PID 4242",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=4242.0. Some of the step tasks have been"
        " OOM Killed.",
        "Out of memory: Killed process 4242 (python3) total-vm:9000000kB, anon-rss:8000000kB",
    ),
    "no-answer": ("no answer within 0.5 s",),
    "quantized-twice": ("ValueError: Blockwise quantization only supports 16/32-bit floats, but got torch.uint8",),
    "unknown-quantization": (
        "ValueError: GGUF model with architecture qwen3moe is not supported yet.",
        "KeyError: 'mxfp8'",
    ),
    "model-of-another-type": (),
    "other-root-in-archive": ("KeyError: \"There is no item named 'consolidated.00/data.pkl' in the archive\"",),
    "distributed-checkpoint-of-ranks": (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED",
    ),
    "image-size-of-model": (
        "AssertionError: Input height (224) doesn't match model (384).",
        "AssertionError: Input image height (224) doesn't match model (518).",
        "AssertionError: Wrong image height! Expected 224 but got 518!",
        "AssertionError: Input height (225) should be divisible by patch size (14).",
        "AssertionError: Input image height 512 is not a multiple of patch height 14",
        "AssertionError: Height (224) doesn't match model (384).",
    ),
    "input-size": ("RuntimeError: Sizes of tensors must match except in dimension 1. Got 57 and 56 in dimension 2",),
    "ties-disagree": (
        "ValueError: This checkpoint seem corrupted. The tied weights mapping for this model specifies to tie a.weight"
        " (which should be present and is not), to shared.weight (which is present).",
        "This checkpoint seem corrupted. The tied weights mapping for this model specifies to tie a.weight to"
        " lm_head.weight, but both are absent from the checkpoint, and we could not find another related tied weight"
        " for those keys",
    ),
    "textual-inversion": (
        "shape mismatch when trying to apply embedding, embedding will be ignored 768 != 1280",
        "ValueError: Loaded embeddings are of incorrect shape. Expected each textual inversion embedding to be of shape"
        " 768, but are 1024",
        "ValueError: You are trying to load a textual inversion embedding that has been saved as a PyTorch tensor. Make"
        " sure to pass the name of the corresponding token in this case: `token=...`.",
    ),
    "unknown-model-type": (
        "ERROR: Could not detect model type of: /models/flux1-dev.safetensors",
        "ValueError: The provided checkpoint does not seem to contain a valid CLIP model.",
        "ValueError: load_jax did not find a supported JAX/Flax parameter layout in model.npz. Native PyTorch and"
        " safetensors weights must use the factory/checkpoint loader.",
        "Warning, This is not a checkpoint file, trying to load it as a diffusion model only.",
        "ValueError: Unexpected architecture type in GGUF file: 'llama'",
    ),
    "untrained-model": (),
    "quick-gelu": (),
    "weights-of-other-framework": (
        "NotImplementedError: Model cannot load numpy checkpoint",
        "ValueError: vit expected a keyed JAX/Flax NumPy .npz checkpoint, but model.pth is not an .npz archive. Native"
        " PyTorch and safetensors weights must use the factory/checkpoint loader.",
    ),
    "not-of-torch-save": (
        "ValueError: Expected input to be a checkpoint returned by torch.save but got a torchscript checkpoint",
        "AssertionError: Unknown typename for persistent_load, expected 'storage' but got 'module'",
        "KeyError: 'pickle storage type \"FooStorage\" is not recognized'",
    ),
    "exported-program": (
        "Expect archive file to be a file ending in .pt2, or is a buffer. Instead got {model.pth}",
        "Unable to load package. f must be a buffer or a file ending in .pt2. Instead got {model.pth}",
        "RuntimeError: We ran into an error when deserializing the saved file. Please check the warnings above for"
        " possible errors.",
        "AssertionError: Version in the saved file has incorrect length, double check if the file is generated by"
        " torch.export.save()",
    ),
    "optimizer-state-missing": (),
    "external-module-of-package": (),
    "not-picklable": (
        "_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: attribute lookup <lambda> on __main__ failed",
        "TypeError: cannot pickle '_thread.lock' object",
    ),
    "entry-that-is-no-tensor": ("ValueError: Unsupported type found in checkpoint! optimizer: <class 'dict'>",),
    "gradient-of-integers": ("RuntimeError: Only Tensors of floating point dtype can require gradients",),
    "half-prefixed-keys": (
        "ValueError: The state dictionary of the model you are training to load is corrupted. Are you sure it was"
        " properly saved?",
    ),
    "nan-in-optimizer": (
        "optimizer state exp_avg_sq has nan values for layer.0.weight",
        "RuntimeError: Found inf in optimizer state of fc.weight",
    ),
    "nothing-was-saved": (
        'ValueError: `.test(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to save the best model.',
    ),
    "no-fsdp-module": (),
    "flattened-range": (),
    "policy-without-statistics": (),
    "clip-without-projection": (),
    "tensorflow-conversion": (),
    "merger-of-ranks": (),
    "code-of-python-2": ("AttributeError: 'collections.OrderedDict' object has no attribute 'iteritems'",),
    "other-release-of-library": (
        "ModuleNotFoundError: Could not import module 'BloomPreTrainedModel'. Are this object's requirements defined"
        " correctly?",
        "AttributeError: 'NoneType' object has no attribute 'missing_keys'",
        "ImportError: cannot import name 'LossKwargs' from 'transformers.utils'"
        " (/site-packages/transformers/utils/__init__.py)",
        "ValueError: Tokenizer class LlamaTokenizer does not exist or is not currently imported.",
        "AttributeError: 'Qwen2Config' object has no attribute 'rope_theta'",
        "ValueError: `rope_scaling` must be a dictionary with two fields, `type` and `factor`, got {'factor':"
        " 8.0, 'rope_type': 'llama3'}",
        "TypeError: PeftAdapterMixin.load_adapter() got an unexpected keyword argument 'is_trainable'",
        "AttributeError: 'UNet2DConditionModel' object has no attribute 'peft_config'",
    ),
    "download-refused": (
        "OSError: You are trying to access a gated repo. Make sure to have access to it at"
        " https://huggingface.co/meta-llama/Llama-2-7b-hf.",
        "urllib.error.HTTPError: HTTP Error 403: Forbidden",
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the"
        " Hub and we cannot find the requested files in the local cache.",
        "gdown.exceptions.FileURLRetrievalError: Failed to retrieve file url: Cannot retrieve the public link of"
        " the file.",
    ),
    "latent-channels": (
        "RuntimeError: Given groups=1, weight of size [320, 9, 3, 3], expected input[2, 4, 64, 64] to have 9"
        " channels, but got 4 channels instead",
    ),
    "width-of-text-encoder": ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (77x768 and 2048x640)",),
    "view-of-other-size": (),
    "dimensions-of-weight": (
        "ValueError: wrong number of dimensions of weight: expected 3, got 2",
        "RuntimeError: Expected 4-dimensional tensor, but got 3-dimensional tensor for argument #1",
        "b, c, h, w = x.shape\n    ^^^^^^^^^^\nValueError: not enough values to unpack (expected 4, got 3)",
    ),
    "parameter-of-ranks": (
        "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet.",
        "RuntimeError: weight should have at least three dimensions",
        "RuntimeError: The expanded size of the tensor (0) must match the existing size (4096) at non-singleton"
        " dimension 0.  Target sizes: [0].  Tensor sizes: [4096]",
        "AssertionError: module.embed_tokens.weight has already been partitioned",
    ),
    "no-latest-file": (
        "ValueError: Unable to find 'latest' file at /out/latest",
        "FileNotFoundError: [Errno 2] No such file or directory: 'out/latest'",
    ),
    "refused-as-malicious": ("Exception: Error verifying pickled file from C:\\sd\\models\\a.ckpt",),
    "old-whole-optimizer": ("AttributeError: 'LambdaLR' object has no attribute '_last_lr'",),
    "none-in-state-dict": (
        "While copying the parameter named 'bias', expected torch.Tensor or Tensor-like object from checkpoint but"
        " received <class 'int'>",
    ),
    "call-of-load-state-dict": (
        "TypeError: load() got an unexpected keyword argument 'strict'",
        "TypeError: Module.load_state_dict() got an unexpected keyword argument 'map_location'",
        "TypeError: 'strict' is an invalid keyword argument for Unpickler()",
    ),
    "assigned-parameter": (),
    "path-is-none": ("AttributeError: 'NoneType' object has no attribute 'endswith'",),
    "merge-into-quantised": ("ValueError: Cannot merge adapters when the model is gptq quantized",),
    "uncalibrated-expert": ("KeyError: 'mlp.experts.17.down_proj'",),
    "layers-on-disk": (
        "ValueError: The current `device_map` had weights offloaded to the disk.",
        "ValueError: At least one of the model submodule will be offloaded to disk, please pass along an"
        " `offload_folder`.",
        "ValueError: Found modules on cpu/disk. Using Exllama or Exllamav2 backend requires all the modules to be"
        " on GPU.",
    ),
    "suffix-of-file": (
        "TypeError: model='yolov8n.pth' should be a *.pt PyTorch model to run this method, but is a different format.",
    ),
    "tokenizer-of-other-release": (
        "OSError: Can't load tokenizer for './out'.",
        "NotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()",
        "FileNotFoundError: File not found: models/7B/tokenizer.model",
    ),
    "no-quantised-engine": (),
    "extension-of-other-numpy": (
        "ImportError: numpy.core.multiarray failed to import",
        "RuntimeError: Numpy is not available",
        "A module that was compiled using NumPy 1.x cannot be run in NumPy 2.1.0 as it may crash.",
    ),
    "model-file-of-torchserve": (),
    "pickle-over-4-gb": (),
    "path-not-model": ("AttributeError: 'str' object has no attribute 'eval'",),
    "not-a-zip": (),
    "quantiser-not-installed": (
        "ImportError: Loading a GPTQ quantized model requires optimum (`pip install optimum`)",
        "importlib.metadata.PackageNotFoundError: No package metadata was found for bitsandbytes",
    ),
}
"""More wordings of each record than its own example, by the record's name."""
