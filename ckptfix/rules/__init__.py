"""The rules, in the order in which they run. Each sees the checkpoint after the edits of those before it."""

from ckptfix.finding import Rule
from ckptfix.rules.all_zero import all_zero
from ckptfix.rules.constant import constant
from ckptfix.rules.damaged_file import damaged_file
from ckptfix.rules.dead_channels import dead_channels
from ckptfix.rules.decayed import decayed
from ckptfix.rules.device_tag import device_tag
from ckptfix.rules.dtype_mismatch import dtype_mismatch
from ckptfix.rules.executable_payload import executable_payload
from ckptfix.rules.foreign_prefix import foreign_prefix
from ckptfix.rules.forward_devices_differ import forward_devices_differ
from ckptfix.rules.forward_fails import forward_fails
from ckptfix.rules.forward_in_training import forward_in_training
from ckptfix.rules.forward_incomparable import forward_incomparable
from ckptfix.rules.forward_non_finite import forward_non_finite
from ckptfix.rules.forward_odd_input import forward_odd_input
from ckptfix.rules.half_overflow import half_overflow
from ckptfix.rules.lost_extras import lost_extras
from ckptfix.rules.malformed_num_batches_tracked import malformed_num_batches_tracked
from ckptfix.rules.missing_key import missing_key
from ckptfix.rules.missing_num_batches_tracked import missing_num_batches_tracked
from ckptfix.rules.missing_wrapper_prefix import missing_wrapper_prefix
from ckptfix.rules.non_finite import non_finite
from ckptfix.rules.not_weights_only import not_weights_only
from ckptfix.rules.outlier_scale import outlier_scale
from ckptfix.rules.renamed_by_release import renamed_by_release
from ckptfix.rules.running_stats import running_stats
from ckptfix.rules.several_state_dicts import several_state_dicts
from ckptfix.rules.shape_mismatch import shape_mismatch
from ckptfix.rules.shard_of_weights import shard_of_weights
from ckptfix.rules.storage_damage import storage_damage
from ckptfix.rules.subnormal import subnormal
from ckptfix.rules.tie import tie
from ckptfix.rules.transient_buffer import transient_buffer
from ckptfix.rules.twins_disagree import twins_disagree
from ckptfix.rules.unexpected_key import unexpected_key
from ckptfix.rules.unexpected_num_batches_tracked import unexpected_num_batches_tracked
from ckptfix.rules.unnamed_weights import unnamed_weights
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
    unnamed_weights,
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
    subnormal,
    dead_channels,
    constant,
    outlier_scale,
    twins_disagree,
    half_overflow,
    forward_fails,
    forward_non_finite,
    forward_in_training,
    forward_devices_differ,
    forward_odd_input,
    forward_incomparable,
)
"""Every rule, once. What names say comes before what shapes say, and both before what values say."""
