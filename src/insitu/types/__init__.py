"""The words of insitu as frozen values (docs/DESIGN.md, section 2), by the stretch of the path they belong
to.

Values move right along the path Task -> Sandbox -> Harness -> Gateway -> Rollout -> Group -> Trainer
and are never changed after they are made. This package knows no I/O, no async and no other module.
"""

from insitu.types.capture import EXCLUSIONS, DriftNote, Ledger, Segment, SegmentKind, Trajectory, Turn
from insitu.types.generation import (
    MIN_TEMPERATURE,
    BoolArray,
    Finish,
    FloatArray,
    Generation,
    IntArray,
    RequestKey,
    SamplingParams,
    VersionRuns,
)
from insitu.types.judgement import (
    Group,
    Outcome,
    Rollout,
    Status,
    Timings,
    Trust,
    Verdict,
    equal_rewards,
)
from insitu.types.messages import Message, ModelRequest, Reply, Role, ToolCall, ToolSpec
from insitu.types.tasks import (
    WORKDIR,
    Case,
    Check,
    Exchange,
    FileEntry,
    GradingPlan,
    HiddenTests,
    Limits,
    Oracle,
    RewardKind,
    Setup,
    Task,
    Tree,
    task_hash,
)

__all__ = [
    "EXCLUSIONS",
    "MIN_TEMPERATURE",
    "WORKDIR",
    "BoolArray",
    "Case",
    "Check",
    "DriftNote",
    "Exchange",
    "FileEntry",
    "Finish",
    "FloatArray",
    "Generation",
    "GradingPlan",
    "Group",
    "HiddenTests",
    "IntArray",
    "Ledger",
    "Limits",
    "Message",
    "ModelRequest",
    "Oracle",
    "Outcome",
    "Reply",
    "RequestKey",
    "RewardKind",
    "Role",
    "Rollout",
    "SamplingParams",
    "Segment",
    "SegmentKind",
    "Setup",
    "Status",
    "Task",
    "Timings",
    "ToolCall",
    "ToolSpec",
    "Trajectory",
    "Tree",
    "Trust",
    "Turn",
    "Verdict",
    "VersionRuns",
    "equal_rewards",
    "task_hash",
]
