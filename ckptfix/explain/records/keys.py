"""Messages about names and shapes: the file and the model do not fit together."""

from __future__ import annotations

from ckptfix.explain.fit import read_fit
from ckptfix.explain.record import Advice, Record

_LOAD_STATE_DICT = "https://pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.load_state_dict"

KEYS = (
    Record(
        name="does-not-fit",
        example='RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "fc.weight".'
        ' Unexpected key(s) in state_dict: "module.fc.weight".',
        patterns=(
            r"Missing key\(s\) in state_dict",
            r"Unexpected key\(s\) in state_dict",
            r"size mismatch for \S+: copying a param",
            r"While copying the parameter named",
            r"Unexpected running stats buffer",
            r"unexpected key \"[^\"]+\" in state_dict",
            r"missing keys in state_dict: ",
            r"_IncompatibleKeys\(missing_keys",
            r"(?:unexpected key|missing keys) in source state_dict",
            r"model and loaded state dict do not match exactly",
            r"Error\(s\) in loading state_dict for",
        ),
        cause="The names or shapes in the file are not those of the model that it is loaded into.",
        advice=(
            Advice(
                "strict=False is no cure: it leaves whatever does not match at random values, and the results are"
                " those of an untrained part."
            ),
        ),
        source=_LOAD_STATE_DICT,
        codes=("KEY", "BUF", "FIT", "FIL105", "FIL101"),
        read=read_fit,
    ),
    Record(
        name="newly-initialized",
        example="Some weights of BertForSequenceClassification were not initialized from the model checkpoint at"
        " bert-base-uncased and are newly initialized: ['classifier.weight', 'classifier.bias']",
        patterns=(
            r"Some weights of .{1,200}? were not initialized from the model checkpoint",
            r"Some weights of the model checkpoint .{1,300}? were not used when initializing",
        ),
        cause="transformers found no weights in the file for a part of the model, and gave it random ones. That is as"
        " it should be for a new head that you will train; for any other part the names do not match, and the model is"
        " broken without an error.",
        advice=(),
        source="https://huggingface.co/docs/transformers/main_classes/model",
        codes=("KEY", "BUF", "FIT"),
        read=read_fit,
    ),
    Record(
        name="key-by-hand",
        example="KeyError: 'module.conv1.weight'",
        patterns=(
            r"KeyError: ['\"](?P<key>[\w.]+\.(?:weight|bias|running_mean|running_var|num_batches_tracked|in_proj_weight"
            r"|weight_g|weight_v|gamma|beta))['\"]",
        ),
        cause="Code that handles the state_dict itself asks for {key}, and there is no such key: often a prefix such as"
        " module. was taken off, or not taken off, by hand.",
        advice=(
            Advice("lists the keys that the file has", "ckptfix inspect {FILE} --verbose"),
            Advice("gives it the names of your model", "ckptfix repair {FILE} --model {MODEL}"),
        ),
        source="https://github.com/pytorch/pytorch/issues/3805",
        codes=("KEY", "BUF", "FIT"),
    ),
    Record(
        name="scheduler-before-optimizer",
        example="KeyError: \"param 'initial_lr' is not specified in param_groups[0] when resuming an optimizer\"",
        patterns=(r"param 'initial_lr' is not specified in param_groups",),
        cause="A scheduler of the learning rate was built with last_epoch, as for a training that goes on, and the"
        " optimizer is a new one: its state was not loaded before. The weights are not concerned.",
        advice=(
            Advice("comes before the scheduler is built", code='optimizer.load_state_dict(checkpoint["optimizer"])'),
            Advice("shows what the file holds beside the weights", "ckptfix inspect {FILE}"),
        ),
        source="https://pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate",
    ),
    Record(
        name="optimizer-groups",
        example="ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's"
        " group",
        patterns=(
            r"loaded state dict contains a parameter group that doesn'?t match the size of optimizer'?s group",
            r"loaded state dict has a different number of parameter groups",
        ),
        frames=(r"torch[/\\]optim[/\\]\w+\.py.{0,1500}(?:KeyError: '\w+'|The size of tensor a \(\d+\) must match)",),
        cause="An optimizer finds its state by position. The model has another number of parameters, or of groups,"
        " than when the state was saved (layers were added, removed, frozen or sorted in another way), or the state is"
        " that of another kind of optimizer.",
        advice=(
            Advice("says whether the weights themselves fit", "ckptfix check {FILE} --model {MODEL}"),
            Advice(
                "Build the optimizer from the same parameters in the same order, or leave its state out: the weights"
                " are good, and it makes a new state while you train."
            ),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.optim.Optimizer.load_state_dict.html",
        codes=("FIT",),
    ),
)
