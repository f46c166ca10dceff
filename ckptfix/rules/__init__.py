"""The rules, in the order in which they run. Each sees the checkpoint after the edits of those before it."""

from ckptfix.finding import Rule
from ckptfix.rules.all_zero import all_zero
from ckptfix.rules.damaged_file import damaged_file
from ckptfix.rules.decayed import decayed
from ckptfix.rules.device_tag import device_tag
from ckptfix.rules.dtype_mismatch import dtype_mismatch
from ckptfix.rules.executable_payload import executable_payload
from ckptfix.rules.foreign_prefix import foreign_prefix
from ckptfix.rules.forward_fails import forward_fails
from ckptfix.rules.forward_non_finite import forward_non_finite
from ckptfix.rules.lost_extras import lost_extras
from ckptfix.rules.malformed_num_batches_tracked import malformed_num_batches_tracked
from ckptfix.rules.missing_key import missing_key
from ckptfix.rules.missing_num_batches_tracked import missing_num_batches_tracked
from ckptfix.rules.missing_wrapper_prefix import missing_wrapper_prefix
from ckptfix.rules.non_finite import non_finite
from ckptfix.rules.not_weights_only import not_weights_only
from ckptfix.rules.renamed_by_release import renamed_by_release
from ckptfix.rules.running_stats import running_stats
from ckptfix.rules.several_state_dicts import several_state_dicts
from ckptfix.rules.shape_mismatch import shape_mismatch
from ckptfix.rules.shard_of_weights import shard_of_weights
from ckptfix.rules.storage_damage import storage_damage
from ckptfix.rules.tie import tie
from ckptfix.rules.transient_buffer import transient_buffer
from ckptfix.rules.unexpected_key import unexpected_key
from ckptfix.rules.unexpected_num_batches_tracked import unexpected_num_batches_tracked
from ckptfix.rules.wrapper_prefix import wrapper_prefix
from ckptfix.rules.wrapper_segment import wrapper_segment
from ckptfix.rules.zero_run import zero_run

RULES: tuple[Rule, ...] = (
    executable_payload,
    damaged_file,
    storage_damage,
    zero_run,
    several_state_dicts,
    shard_of_weights,
    not_weights_only,
    device_tag,
    lost_extras,
    wrapper_segment,
    wrapper_prefix,
    missing_wrapper_prefix,
    foreign_prefix,
    renamed_by_release,
    missing_num_batches_tracked,
    unexpected_num_batches_tracked,
    malformed_num_batches_tracked,
    transient_buffer,
    shape_mismatch,
    tie,
    unexpected_key,
    missing_key,
    dtype_mismatch,
    non_finite,
    running_stats,
    decayed,
    all_zero,
    forward_fails,
    forward_non_finite,
)
"""Every rule, once. What names say comes before what shapes say, and both before what values say."""
