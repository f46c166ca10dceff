"""Messages about what a file holds beside tensors: classes, whole models, and objects that are no state_dict."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

_LOAD = "https://pytorch.org/docs/stable/generated/torch.load.html"
_TAKE_OUT = Advice(
    "writes a copy of tensors and plain data alone, which torch.load reads as it is; no code of the file runs",
    "ckptfix repair {FILE}",
)
_TRUST = Advice(
    "runs whatever the file says: only for a file whose author you trust",
    code="torch.load({path}, weights_only=False)",
)

PICKLES = (
    Record(
        name="weights-only-class",
        example="_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported global: GLOBAL"
        " argparse.Namespace was not an allowed global by default.",
        patterns=(
            r"Unsupported global: GLOBAL (?P<global>[\w.]+)",
            r"Trying to load unsupported GLOBAL (?P<global>[\w.]+)",
            r"Unsupported class (?!file\b)(?P<global>[\w.]+)",
            r"allowlisted via `add_safe_globals`,? but got <class '(?P<global>[\w.]+)'",
            r"Can only build Tensor,? parameter or dict objects, but got (?P<global>.{1,80}?)(?:\.|$)",
        ),
        cause="Since torch 2.6 torch.load takes tensors and plain data only (weights_only=True), and the file holds an"
        " object of another kind beside the weights: {global}.",
        advice=(_TAKE_OUT, _TRUST),
        source=_LOAD,
        codes=("FIL102", "FIL901"),
        unknown={"global": "its name is not in this message"},
    ),
    Record(
        name="weights-only",
        example="_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have"
        " two options, do those steps only if you trust the source of the checkpoint.",
        patterns=(
            r"Weights[- ]only load failed",
            r"Cannot use `*weights_only=True`* with files saved in the legacy \.tar",
        ),
        cause="Since torch 2.6 torch.load takes tensors and plain data only (weights_only=True), and the file holds"
        " more, or is none of torch's. The line that says what it is, below this one, is missing here.",
        advice=(Advice("names what torch.load refuses in it", "ckptfix check {FILE}"), _TAKE_OUT, _TRUST),
        source=_LOAD,
        codes=("FIL102", "FIL901", "FIL2"),
        general=True,
    ),
    Record(
        name="weights-only-warning",
        example="FutureWarning: You are using `torch.load` with `weights_only=False` (the current default value),"
        " which uses the default pickle module implicitly.",
        patterns=(r"You are using `torch\.load` with `weights_only=False`",),
        cause="This is a warning and stops nothing: torch 2.4 and 2.5 announce that torch.load will refuse files with"
        " more than tensors and plain data.",
        advice=(
            Advice("says whether the file is one of those", "ckptfix check {FILE}"),
            Advice("is what to write, and silences it", code="torch.load({path}, weights_only=True)"),
        ),
        source=_LOAD,
        codes=("FIL102",),
        general=True,
    ),
    Record(
        name="missing-class",
        example="AttributeError: Can't get attribute 'Net' on <module '__main__' from 'train.py'>",
        patterns=(
            r"Can't get (?:local )?attribute '(?P<class>(?!_rebuild_)[\w.]+)' on <module '(?P<module>[\w.]+)'",
            r"Can't get attribute '(?P<class>(?!_rebuild_)[\w.]+)'(?! on)",
        ),
        cause="The whole model or another object of the class {class} of {module} was saved, and that class is not"
        " there when the file is loaded.",
        advice=(
            Advice("takes the weights out of the file without the class", "ckptfix repair {FILE}"),
            Advice("saves only the weights next time", code="torch.save(model.state_dict(), path)"),
        ),
        source="https://pytorch.org/tutorials/beginner/saving_loading_models.html",
        codes=("FIL102",),
        unknown={"module": "the program that saved it"},
    ),
    Record(
        name="missing-module",
        example="ModuleNotFoundError: No module named 'models'",
        patterns=(
            r"No module named ['\"]?(?P<module>(?!dill\b|numpy\.|torch['\"\s]|torch$|torch\._six|torch\.utils\.ffi"
            r"|torchvision\.models\.utils"
            r"|torchvision\._C)[\w.]+)",
        ),
        cause="If torch.load or pickle stands in the traceback: a whole model was saved, and loading it imports the"
        " source code that it was saved with, the module {module}. If not, a package is missing in your environment.",
        advice=(
            Advice("takes the weights out of the file without that code", "ckptfix repair {FILE}"),
            Advice("Or run from the folder that has {module}, or install the package of that name."),
        ),
        source="https://github.com/ultralytics/yolov5/issues/353",
        codes=("FIL102",),
    ),
    Record(
        name="path-of-other-system",
        example="NotImplementedError: cannot instantiate 'PosixPath' on your system",
        patterns=(r"cannot instantiate '(?P<path_class>PosixPath|WindowsPath)' on your system",),
        cause="The file holds a path ({path_class}) of another operating system beside the weights.",
        advice=(
            Advice("writes the path as text, and the rest as it is", "ckptfix repair {FILE}"),
            Advice("saves paths as text", code='checkpoint["path"] = str(path)'),
        ),
        source="https://docs.python.org/3/library/pathlib.html",
        codes=("FIL102",),
    ),
    Record(
        name="old-dill",
        example="ValueError: 'torch' supports dill >= 0.3.1, but you have dill 0.2.9. Please upgrade dill or switch to"
        " 'pickle'",
        patterns=(r"supports dill >= (?P<version>[\d.]+)", r"No module named ['\"]?dill\b"),
        cause="The file was pickled with dill, and the dill that is installed is older than torch needs, or there is"
        " none.",
        advice=(_TAKE_OUT, Advice("Or: pip install -U dill")),
        source=_LOAD,
        codes=("FIL102",),
    ),
    Record(
        name="state-dict-not-model",
        example="AttributeError: 'collections.OrderedDict' object has no attribute 'eval'",
        patterns=(
            r"'(?:collections\.)?(?:OrderedDict|dict)' object has no attribute '(?P<attribute>eval|cuda|train"
            r"|half|parameters|named_parameters|state_dict|load_state_dict|modules|forward|module|children|fuse)'",
            r"'(?:collections\.)?OrderedDict' object has no attribute '(?P<attribute>to|cpu|float"
            r"|model|dim|size|shape)'",
            r"'(?:collections\.)?OrderedDict' object is not callable",
        ),
        cause="torch.load gave back a dict of weights, and the code uses it as a model ({attribute}). The file holds a"
        " state_dict, or a container with one, and no model.",
        advice=(
            Advice("shows what the file holds and where its weights are", "ckptfix inspect {FILE}"),
            Advice(
                "builds the model first and loads into it",
                code="model = Net(); model.load_state_dict(torch.load({path}, map_location='cpu')); model.eval()",
            ),
        ),
        source="https://pytorch.org/tutorials/beginner/saving_loading_models.html",
        unknown={"attribute": "called"},
    ),
    Record(
        name="model-not-state-dict",
        example="TypeError: Expected state_dict to be dict-like, got <class 'torch.nn.modules.linear.Linear'>.",
        patterns=(r"Expected state_dict to be dict-like, got (?:<class )?'?(?P<got>[\w.]+)",),
        cause="load_state_dict wants a dict of tensors and got {got}: the whole model was saved, or a function that"
        " was to return the weights returned nothing.",
        advice=(
            Advice("shows what the file holds", "ckptfix inspect {FILE}"),
            Advice("takes the state_dict out of a whole model", "ckptfix repair {FILE} --format pth -o weights.pth"),
            Advice("does the same where the class can be imported", code="model.load_state_dict(loaded.state_dict())"),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict",
        unknown={"got": "None"},
        frames=(r"load_state_dict.{0,600}'NoneType' object has no attribute '(?:copy|keys|items)'",),
    ),
    Record(
        name="container-key",
        example="KeyError: 'state_dict'",
        patterns=(
            r"KeyError: ['\"](?P<key>(?:model_|net_|ema_|optimizer_)?state_dict(?:_ema)?|model|net|network|ema"
            r"|params_ema|optimizer|epoch|g_ema|model_state)['\"]",
        ),
        cause="If the dict is what torch.load gave back: the file has no entry '{key}'. It holds the bare state_dict,"
        " or keeps the weights under another name.",
        advice=(
            Advice("shows the entries of the file and where its weights are", "ckptfix inspect {FILE}"),
            Advice("takes either", code='state_dict = checkpoint.get("state_dict", checkpoint)'),
        ),
        source="https://pytorch.org/tutorials/beginner/saving_loading_models.html",
        codes=("FIL101",),
    ),
)
