"""Everything that is known of messages, one record each."""

from ckptfix.explain.record import Record
from ckptfix.explain.records.cuda import CUDA
from ckptfix.explain.records.devices import DEVICES
from ckptfix.explain.records.dtypes import DTYPES
from ckptfix.explain.records.files import FILES
from ckptfix.explain.records.forward_test import FORWARD_TEST
from ckptfix.explain.records.inputs import INPUTS
from ckptfix.explain.records.keys import KEYS
from ckptfix.explain.records.libraries import LIBRARIES
from ckptfix.explain.records.memory import MEMORY
from ckptfix.explain.records.pickles import PICKLES
from ckptfix.explain.records.releases import RELEASES
from ckptfix.explain.records.training import TRAINING

RECORDS: tuple[Record, ...] = (
    *KEYS,
    *PICKLES,
    *FILES,
    *RELEASES,
    *LIBRARIES,
    *DEVICES,
    *DTYPES,
    *CUDA,
    *MEMORY,
    *INPUTS,
    *TRAINING,
    *FORWARD_TEST,
)
"""All records. A message is to match one of them alone, those that are general aside."""

__all__ = ["RECORDS"]
