from __future__ import annotations

import pytest

from ckptfix.core.facts import Kind
from ckptfix.reading.pickles.payload import is_payload, payload_remarks

HARMLESS = """torch._utils._rebuild_tensor_v2 torch.FloatStorage collections.OrderedDict argparse.Namespace
    pathlib.PosixPath numpy.core.multiarray.scalar numpy.dtype models.yolo.Model builtins.getattr
    __builtin__.set builtins.slice _codecs.encode copyreg._reconstructor torch.nn.modules.conv.Conv2d
    omegaconf.dictconfig.DictConfig datetime.datetime operator.itemgetter codecs.encode functools.partial
    types.SimpleNamespace mymodel.os_utils.System sysmodel.Net osprey.Net models.system.Net
    joblib.numpy_pickle.NumpyArrayWrapper torch._dynamo.decorators._DimRange
    sympy.core.symbol.Symbol sympy.core.function._rebuild_undef sympy.functions.elementary.trigonometric.sin""".split()

PAYLOADS = """os.system posix.system nt.system subprocess.Popen builtins.eval __builtin__.execfile builtins.exec
    builtins.__import__ runpy._run_code importlib.import_module ctypes.CDLL socket.socket webbrowser.open
    pty.spawn shutil.rmtree pickle.loads torch.serialization.os.system torch.load torch.hub.load numpy.load
    numpy.testing._private.utils.runstring types.CodeType operator.attrgetter code.InteractiveInterpreter
    pdb.run timeit.timeit cloudpickle.loads builtins.open io.open torch.utils.cpp_extension.load bdb.Bdb.run
    pip._internal.main asyncio.unix_events copyreg.add_extension sympy.core.sympify.sympify sympy.lambdify""".split()


@pytest.mark.parametrize("name", HARMLESS)
def test_a_name_that_checkpoints_need_is_no_payload(name):
    assert not is_payload(name)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_name_that_only_runs_code_is_a_payload(name):
    assert is_payload(name)


@pytest.mark.parametrize("name", ["", ".", "os", "builtins", "builtins.", "..", "a.b."])
def test_an_odd_name_is_judged_without_a_crash(name):
    assert is_payload(name) in (True, False)


def test_each_payload_is_remarked_once():
    assert [(fact.kind, fact.data["name"]) for fact in payload_remarks({"os.system", "torch.FloatStorage"})] == [
        (Kind.PAYLOAD, "os.system")
    ]
