import _compat_pickle
import argparse
import collections
import collections.abc
import configparser
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import logging
import operator
import pathlib
import pickle
import pkgutil
import platform
import random
import re
import signal
import sys
import threading
import typing
import uuid
import weakref
import zipfile
import zoneinfo

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.testing._comparison import TensorLikePair
from torch.testing._internal.two_tensor import TwoTensor

from ckptfix.bytes.sources import Content
from ckptfix.core.facts import Kind
from ckptfix.errors import HostileError
from ckptfix.reading.opening import open_file
from ckptfix.reading.pickles.payload import _lists, is_payload, is_trusted, payload_remarks, runs_code
from ckptfix.reading.torch_files.torch_legacy import read
from tests.attacks.crafted import torch_zip


class Color(enum.Flag):
    RED = 1
    BLUE = 2


CONFIGURATION = configparser.ConfigParser()
CONFIGURATION.read_dict({"model": {"width": "64"}})


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def found(data: bytes) -> list[str]:
    return [fact.data["name"] for fact in read(Content("some.pkl", data)).remarks if fact.kind is Kind.PAYLOAD]


HEALTHY = {
    "functions that are named": [torch.nn.functional.relu, torch.nn.functional.gelu, torch.relu, len, np.sum],
    "modules": torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.GELU(), torch.nn.LSTM(2, 2)
    ),
    "an optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(),
    "torch values": [torch.device("cpu"), torch.float16, torch.Size([2]), torch.strided, torch.ones(2).to_sparse()],
    "what is kept beside weights": [
        torch.__version__,
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1),
        torch.amp.GradScaler("cpu", enabled=False),
        torch.nn.utils.rnn.pack_sequence([torch.ones(2)]),
        torch.max(torch.ones(2, 2), 0),
        torch.distributions.Categorical(logits=torch.ones(3)),
        torch.ao.quantization.MinMaxObserver(),
        torch.utils.data.TensorDataset(torch.ones(2)),
        torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)),
        torch.nn.UninitializedParameter(),
    ],
    "numpy values": [
        np.float32(1),
        np.int64(2),
        np.datetime64("2020-01-01"),
        np.array(["a", None], object),
        np.dtype("f4"),
    ],
    "numpy random states": [np.random.RandomState(0), np.random.default_rng(0), np.random.get_state()],
    "numpy masked and record arrays": [
        np.ma.array([1, 2], mask=[False, True]),
        np.zeros(1, [("a", "f4")]).view(np.recarray),
    ],
    "numpy matrix and ufunc": [np.matrix([[1]]), np.add],
    "dates": [datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(1), zoneinfo.ZoneInfo("UTC")],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), 1j, slice(1, 2), range(3), random.Random(1)],
    "containers": [collections.defaultdict(list), collections.deque([1]), collections.Counter("aa")],
    "paths and names": [pathlib.PurePosixPath("a"), uuid.uuid4(), argparse.Namespace(a=1), logging.getLogger("x")],
    "functions made of functions": [functools.partial(torch.nn.LayerNorm, eps=1e-6), operator.itemgetter(1)],
    "a tensor that its class makes of others": TwoTensor(torch.ones(2), torch.zeros(2)),
    "what torch's documentation saves beside a model": [PowerSGDState(None), powerSGD_hook, torch.no_grad()],
    "patterns and iterators": [re.compile("a+"), iter([1]), type(None)],
    "types": [typing.Literal["a"], typing.Callable[[int], str], dict[str, int], int | str, list[int]],
    "what threads and profilers leave": [
        threading.Lock,
        threading.RLock,
        weakref.ref,
        weakref.WeakKeyDictionary,
        torch.autograd.profiler.record_function("forward"),
        torch.profiler.ProfilerAction.NONE,
        torch.profiler.profile,
        TensorLikePair,
        signal.SIGUSR1,
        contextlib.ExitStack(),
        logging.LoggerAdapter(logging.getLogger("x"), {}),
    ],
    "the machine": [platform.uname(), pathlib.Path.cwd().stat(), np.finfo(np.float32), np.iinfo(np.int8)],
    "a file of settings": CONFIGURATION,
    "interfaces": [collections.abc.Mapping, collections.abc.Callable, collections.abc.Callable[[int], str]],
    "iterators over lists": [zip([1], [2], strict=False), enumerate([1])],
    "conditions of decimals": [decimal.Context(), decimal.Inexact("x")],
    "enums": [Color.RED, Color.RED | Color.BLUE, re.IGNORECASE | re.MULTILINE],
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("values", HEALTHY.values(), ids=HEALTHY)
def test_noop_objects_of_ordinary_checkpoints(values, protocol):
    try:
        data = pickle.dumps({"x": values}, protocol)
    except TypeError:
        pytest.skip("torch does not pickle these by the old protocol")
    assert found(data) == []


EXECUTORS = """pathlib.Path.unlink pathlib.PosixPath.write_text functools.reduce uuid._get_command_stdout yaml.load
    setuptools._distutils.spawn.spawn distutils.file_util.write_file torch.onnx.export torch._ops._Ops.load_library
    torch.jit.unsupported_tensor_ops.execWrapper torch.fx.graph_module._forward_from_src __builtin__.reload
    numpy.testing.runstring sklearn.externals.joblib.load copy._reconstruct builtins.map functools.partial()
    torchvision.datasets.utils.download_url jsonpickle.decode timm.models.load_checkpoint
    builtins.getattr() logging.config.listen keras.models.load_model""".split()


def test_a_function_that_does_something_is_found_by_its_call():
    assert [name for name in EXECUTORS if not runs_code(name)] == []


@pytest.mark.parametrize("name", ["models.yolo.load", "mylib.rebuild", "omegaconf.create", "", ".", "os", "torch."])
def test_functions_of_packages_that_no_one_else_has_are_not_judged(name):
    assert not runs_code(name)


PATHS = pathlib.Path.__module__  # `pathlib._local` in Python 3.13


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (Calls(pathlib.Path.write_text, "x"), [f"{PATHS}.Path.write_text"]),
        (Calls(map, pathlib.Path.unlink, ["x"]), ["builtins.map", f"{PATHS}.Path.unlink"]),
        (Calls(Calls(functools.partial, torch.nn.init.zeros_, 1)), ["torch.nn.init.zeros_"]),
    ],
    ids=["a method", "a function that calls", "a function with its arguments"],
)
def test_what_a_pickle_calls_is_remarked(value, names):
    if isinstance(value.call[0], Calls):
        # Pickle refuses to write such a call; the opcodes are: the function, its arguments, REDUCE, and once more.
        data = b"\x80\x02cfunctools\npartial\nctorch.nn.init\nzeros_\n\x85R)R."
    else:
        data = pickle.dumps(value, 4)
    assert found(data) == names


LOADER = b"cyaml\nunsafe_load\n"
WRAPPED = b"cfunctools\npartial\n(" + LOADER + b"VX\ntR"


@pytest.mark.parametrize(
    "handed",
    [LOADER, WRAPPED, b"(l" + WRAPPED + b"a", b"cfunctools\npartial\n(cbuiltins\nint\ntR(" + LOADER + b")}Ntb"],
    ids=["itself", "with its arguments", "in a list", "by a state"],
)
@pytest.mark.parametrize("caller", ["torch.optim.lr_scheduler LambdaLR", "numpy.random._pickle __generator_ctor"])
def test_functions_passed_to_torch_and_numpy_are_judged(caller, handed):
    module, name = caller.encode().split()
    assert found(b"c" + module + b"\n" + name + b"\n(N" + handed + b"tR.") == ["yaml.unsafe_load"]
    assert found(handed + b".") == []


def test_a_function_that_is_wrapped_over_and_over_is_hidden():
    made = WRAPPED
    for _ in range(20):
        made = b"cfunctools\npartial\n(" + made + b"tR"
    assert found(b"ctorch.optim.lr_scheduler\nLambdaLR\n(N" + made + b"tR.") == ["functools.partial"]


@pytest.mark.parametrize(
    ("function", "state", "names"),
    [
        ("mymodel.rebuild", b"", []),
        ("collections.deque", b"", []),
        ("torch.nn.init.zeros_", b"", ["torch.nn.init.zeros_"]),
        ("builtins.map", b"", ["builtins.map"]),
        ("collections.deque", b"(cmymodel\nrebuild\n(t}Ntb", []),
        ("collections.deque", b"(ctorch.nn.init\nzeros_\n(t}Ntb", ["torch.nn.init.zeros_"]),
        ("mymodel.rebuild", b"(I1\ntb", ["functools.partial"]),
        ("mymodel.rebuild", b"(cfunctools\npartial\n)R(t}Ntb", ["functools.partial"]),
    ],
)
def test_a_call_of_a_partial_is_a_call_of_its_function(function, state, names):
    """The second half of the rows sets its state, as ``partial.__setstate__`` does."""
    module, _, name = function.rpartition(".")
    made = f"cfunctools\npartial\n(c{module}\n{name}\ntR".encode()
    assert found(b"\x80\x02" + made + state + b"(I7\ntR.") == names


def test_a_name_that_is_called_is_remarked_once():
    assert [fact.data["name"] for fact in payload_remarks({"torch.load", "torch.load()", "copy.copy()"})] == [
        "copy.copy",
        "torch.load",
    ]


HARMLESS = """torch._utils._rebuild_tensor_v2 torch.FloatStorage collections.OrderedDict argparse.Namespace
    pathlib.PosixPath numpy.core.multiarray.scalar numpy.dtype models.yolo.Model builtins.getattr
    __builtin__.set builtins.slice _codecs.encode copyreg._reconstructor torch.nn.modules.conv.Conv2d
    omegaconf.dictconfig.DictConfig datetime.datetime operator.itemgetter codecs.encode functools.partial
    types.SimpleNamespace parser.Net mymodel.os_utils.System sysmodel.Net osprey.Net models.system.Net
    joblib.numpy_pickle.NumpyArrayWrapper torch._dynamo.decorators._DimRange
    torch._inductor.compile_fx.compile_fx torch._dynamo.backends.debugging.eager
    torch._dynamo.backends.cudagraphs.CudagraphsBackend
    sympy.core.symbol.Symbol sympy.core.function._rebuild_undef sympy.functions.elementary.trigonometric.sin""".split()

PAYLOADS = """os.system posix.system nt.system subprocess.Popen builtins.eval __builtin__.execfile builtins.exec
    builtins.__import__ runpy._run_code importlib.import_module ctypes.CDLL socket.socket webbrowser.open
    pty.spawn shutil.rmtree pickle.loads torch.serialization.os.system torch.load torch.hub.load numpy.load
    numpy.testing._private.utils.runstring types.CodeType operator.attrgetter code.InteractiveInterpreter
    pdb.run timeit.timeit cloudpickle.loads builtins.open io.open torch.utils.cpp_extension.load bdb.Bdb.run
    PIL.EpsImagePlugin.Ghostscript PIL.ImageShow.show cv2.VideoCapture nltk.downloader.Downloader
    pip._internal.main asyncio.unix_events copyreg.add_extension sympy.core.sympify.sympify sympy.lambdify
    pandas.ExcelWriter pandas.core.computation.expr.Expr h5py.File cv2.FileStorage
    matplotlib.backends.backend_pdf.PdfPages""".split()


def test_a_name_that_checkpoints_need_is_not_a_payload():
    assert [name for name in HARMLESS if is_payload(name)] == []


def test_a_name_that_only_runs_code_is_a_payload():
    assert [name for name in PAYLOADS if not is_payload(name)] == []


@pytest.mark.parametrize("name", ["", ".", "os", "builtins", "builtins.", "..", "a.b."])
def test_an_odd_name_is_judged_without_a_crash(name):
    assert is_payload(name) in (True, False)


def test_each_payload_is_remarked_once():
    assert [(fact.kind, fact.data["name"]) for fact in payload_remarks({"os.system", "torch.FloatStorage"})] == [
        (Kind.PAYLOAD, "os.system")
    ]


BYPASSES = """random._os.system enum.bltns.eval collections._sys.exit decimal._numbers.sys.exit copyreg.sys.exit
    imaplib.IMAP4_stream logging.FileHandler logging.handlers.RotatingFileHandler poplib.POP3 nntplib.NNTP
    gzip.GzipFile mmap.mmap torch._C.PyTorchFileWriter torch._C.PyTorchFileReader torch._C._distributed_c10d.TCPStore
    torch.distributed.TCPStore test.support.script_helper.assert_python_ok _pyrepl.pager.pipe_pager pipes.Template
    mailcap.findmatch commands.getoutput popen2.Popen3 os2.system _winreg.ConnectRegistry md5.new
    fickling.hook.remove_hook picklescan.scanner.scan_file_path builtins.map builtins.filter itertools.starmap
    functools.reduce operator.methodcaller tempfile.NamedTemporaryFile zipfile.ZipFile sqlite3.connect ssl.SSLContext
    multiprocessing.pool.Pool threading.Thread concurrent.futures.ThreadPoolExecutor distutils.spawn.spawn
    numpy.DataSource numpy.lib._datasource.DataSource torch.utils.data.datapipes.iter.fileopener.FileOpenerIterDataPipe
    torch.distributed.checkpoint.filesystem.FileSystemWriter torch.utils.tensorboard.writer.SummaryWriter
    torch.nn.modules.module.warnings.sys.exit datetime.sys.exit xml.sax.parse
    annotationlib.ForwardRef.evaluate torch._inductor.compile_fx.compile_fx torch._dynamo.backends.debugging.eager
    torch._dynamo.backends.debugging.os.system torch.fx.graph_module.GraphModule
    torch.fx.graph_module.reduce_deploy_graph_module
    torch.ao.quantization.fx.graph_module.ObservedGraphModule""".split()


def test_a_call_of_any_name_that_is_not_trusted_is_found():
    assert [name for name in BYPASSES if not (is_payload(name) or runs_code(name))] == []


def classes(*packages: str) -> list[str]:
    """The names of the classes that the modules of packages define."""
    found = []
    for package in packages:
        root = importlib.import_module(package)
        modules = [package, *(info.name for info in pkgutil.iter_modules(root.__path__, f"{package}."))]
        for module in modules:
            for name, value in vars(importlib.import_module(module)).items():
                if isinstance(value, type) and value.__module__ == module and value.__qualname__ == name:
                    found.append(f"{module}.{name}")
    return found


def test_the_classes_that_torch_pickles_are_trusted():
    names = classes("torch.nn.modules", "torch.optim", "torch.distributions", "torch.ao.nn.quantized.modules")
    names += [f"torch.{value}Storage" for value in ("Float", "Half", "BFloat16", "Byte", "Long", "Untyped")[:5]]
    names += """torch.distributed.remote_device._remote_device torch.distributed._shard.metadata.ShardMetadata
        torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata torch.distributed.tensor.DTensor
        torch.distributed._shard.checkpoint.metadata.Metadata torch.distributed._sharded_tensor.api.ShardedTensor
        torch.distributed._shard.checkpoint.filesystem._StorageInfo torch.distributed.checkpoint.storage.WriteResult
        torch.distributed._sharding_spec.chunk_sharding_spec.ChunkShardingSpec
        torch.distributed.checkpoint.state_dict.StateDictOptions
        torch.distributed.algorithms.ddp_comm_hooks.DDPCommHookType
        torch.distributed.device_mesh.DeviceMesh torch.nested._internal.nested_tensor._rebuild_njt torch.Generator
        torch.cuda.amp.grad_scaler.GradScaler torch.nn.parameter.UninitializedParameter torch.fx.graph.Graph
        torch.nn.quantized.modules.linear.Linear torch.nn.intrinsic.modules.fused.ConvReLU2d
        torch.quantization.observer.MinMaxObserver torch.quantization.qconfig.QConfig torch.tensor.Tensor
        torch.nn.modules.linear._LinearWithBias torch.nn.backends.thnn.THNNFunctionBackend
        torch.nn.utils.spectral_norm.SpectralNormStateDictHook torch.utils.data.dataset.TensorDataset
        torch.tensor._rebuild_from_type torch.backends.cudnn.rnn.Unserializable scipy.spatial.ckdtree.cKDTree
        numpy._core._internal._convert_to_stringdtype_kwargs pandas.core.internals.blocks.new_block
        torch.jit.LoweredModule.nnapi.Net joblib.numpy_pickle.NDArrayWrapper""".split()
    assert [name for name in names if is_payload(name) or runs_code(name)] == []


def test_classes_of_other_releases_are_trusted_in_known_modules():
    assert not runs_code("torch.nn.modules.hologram.HoloConv3d")
    assert runs_code("torch.hologram.HoloConv3d")


@pytest.mark.parametrize("version", ["2.7", "3.14"])
def test_the_answer_is_the_same_on_every_python(version, monkeypatch):
    names = [*BYPASSES, *HARMLESS, *PAYLOADS]
    before = [(is_payload(name), runs_code(name)) for name in names]
    monkeypatch.setattr(sys, "stdlib_module_names", frozenset())
    assert [(is_payload(name), runs_code(name)) for name in names] == before


def test_every_trusted_name_is_one_that_exists_in_some_release():
    """A misspelt line would not trust anything."""
    for name in ("collections.OrderedDict", "zoneinfo.ZoneInfo._unpickle", "numpy._core.multiarray.scalar"):
        assert is_trusted(name)
    for module, names in _lists("trusted_globals.txt").items():
        for name in names:  # and as protocol 2 names it, which torch.save writes
            old, leaf = _compat_pickle.REVERSE_NAME_MAPPING.get((module, name), (module, name))
            assert is_trusted(f"{_compat_pickle.REVERSE_IMPORT_MAPPING.get(old, old)}.{leaf}"), (module, name)
    assert is_trusted("builtins.len")  # of a defaultdict that numbers what it is asked for
    assert not is_trusted("collections")


GETS = b"cbuiltins\nabs\n"
TRICKS = {
    "iter with a sentinel": b"cbuiltins\nlist\ncbuiltins\niter\n(cfunctools\npartial\n" + GETS + b"\x85RNtR\x85R.",
    "__setstate__ in the state": b"ctypes\nSimpleNamespace\n)R}X\x0c\0\0\0__setstate__" + GETS + b"sb.",
    "append in the state": b"cmymodel\nNet\n)\x81}X\6\0\0\0append" + GETS + b"sb.",
    "the state of a class": b"cmymodel\nNet\n}X\1\0\0\0aK\1sb.",
    "list of what runs": b"cbuiltins\nlist\n(ctorch.utils.data.dataloader\nDataLoader\n)RtR.",
    "a member of a function": b"cbuiltins\ngetattr\n(cmymodel\nNet\nX\x0b\0\0\0__globals__tR.",
    "an extension": b"\x80\x02\x82\x01.",
    "the factory of a defaultdict": b"coperator\ngetitem\n(ccollections\ndefaultdict\n(" + GETS + b"tRX\1\0\0\0ktR.",
    "a class with methods of its own": b"cbuiltins\ntype\n(X\1\0\0\0X)}tR.",
    "a class made by NEWOBJ": b"cbuiltins\ntype\n(X\1\0\0\0X)}t\x81.",
    "a tensor's rebuilder that is made": b"ctorch._tensor\n_rebuild_from_type_v2\n(cfunctools\npartial\n"
    + GETS
    + b"\x85R"
    b"ctorch\nTensor\n)}tR.",
    "a ufunc of another module": b"cnumpy.core\n_ufunc_reconstruct\n(X\2\0\0\0osX\6\0\0\0systemtR.",
    "the importer of a graph": b"ctorch.fx.graph_module\nreduce_deploy_graph_module\n(N}X\0\0\0\0tR.",
    "a method of a path, named": b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\n)RX\6\0\0\0unlinktR.",
    "a block of pandas whose maker was exchanged": b"cfunctools\npartial\n("
    b"cpandas.core.internals.blocks\nnew_block\ntR(" + GETS + b"(t}NtbK\1\x85R.",
    "what evaluates text, named": b"cfunctools\npartial\nctyping\nget_type_hints\n\x85R.",
    "a module of torch's own": b"ctorch.nn.parallel.distributed\nlogging.FileHandler\n.",
    "a module of torch by its alias": b"ctorch.nn.modules.linear\nF.importlib.import_module\n.",
    "a text that sympy evaluates": b"csympy.functions.elementary.complexes\nAbs\n(X\3\0\0\x001+1tR.",
    "the same in a list": b"csympy.matrices.dense\nMutableDenseMatrix\n((X\3\0\0\x001+1ltR.",
    "the same as an object": b"csympy\nTuple\n(ccollections\nUserString\n(X\3\0\0\x001+1tRtR.",
    "the same by NEWOBJ": b"csympy.core.function\nLambda\n(X\1\0\0\0xX\3\0\0\x001+1t\x81.",
    "a file system made of another class": b"cfsspec.spec\nmake_instance\n(cmymodel\nNet\n)}tR.",
    "the same by getattr": b"cbuiltins\ngetattr\n(ctorch.nn.parallel.distributed\nlogging\nX\x0b\0\0\0FileHandlertR.",
}


def test_calls_without_a_bad_name_are_found():
    assert [case for case, data in TRICKS.items() if not found(b"\x80\x02" + data)] == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"csympy.core.symbol\nDummy\n(X\1\0\0\0xK\1t\x81.", id="a symbol"),
        pytest.param(b"csympy.functions.elementary.trigonometric\nsin\n(csympy.core.numbers\nInteger\nK\1\x85\x81t\x81.",
                     id="a function of sympy"),
        pytest.param(b"cfunctools\npartial\n(cpandas.core.internals.blocks\nnew_block\ntR("
                     b"cpandas.core.internals.blocks\nnew_block\n(t}X\4\0\0\0ndimK\2sNtb"
                     b"(K\1cbuiltins\nslice\n(K\0K\1K\1tRtR.", id="a block of pandas 1.3"),
        pytest.param(b"cfsspec.spec\nmake_instance\n(cfsspec.implementations.local\nLocalFileSystem\n)}tR.",
                     id="the file system of a ModelCheckpoint"),
        pytest.param(b"cscipy.interpolate._interpolate\ninterp1d\n)\x81.", id="interp1d"),
        pytest.param(b"cpandas.core.indexes.datetimes\n_new_DatetimeIndex\n(cpandas.core.indexes.datetimes\n"
                     b"DatetimeIndex\n}tR.", id="dates of pandas"),
    ],
)  # fmt: skip
def test_noop_calls_that_construct_values(data):
    assert found(b"\x80\x02" + data) == []


def test_noop_a_state_of_plain_data():
    assert found(b"\x80\x02cmymodel\nNet\n)\x81}X\6\0\0\0appendK\1sb.") == []


@pytest.mark.parametrize("lie", [-4, 3, 1000], ids=["too short", "into an opcode", "too long"])
def test_a_frame_of_wrong_size_is_refused(lie, tmp_path):
    file = io.BytesIO()
    torch.save({"w": torch.ones(2), "name": "x" * 20}, file, pickle_protocol=4)
    archive = zipfile.ZipFile(file)
    data = archive.read("archive/data.pkl")
    assert data[2:3] == b"\x95"
    size = int.from_bytes(data[3:11], "little") + lie
    changed = data[:3] + size.to_bytes(8, "little") + data[11:]
    path = tmp_path / "file.pth"
    path.write_bytes(torch_zip(changed, {"data/0": archive.read("archive/data/0")}))
    with pytest.raises(HostileError, match="frames and opcodes of its pickle"):
        open_file(str(path))
    path.write_bytes(torch_zip(data, {"data/0": archive.read("archive/data/0")}))
    assert open_file(str(path)).keys() == ["w"]
