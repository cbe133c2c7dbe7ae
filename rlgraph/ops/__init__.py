"""Declarations of ops: ``op``, the types of columns, and the interfaces that a body uses."""

from rlgraph.ops.column_types import File as File
from rlgraph.ops.column_types import boolean as boolean
from rlgraph.ops.column_types import float32 as float32
from rlgraph.ops.column_types import int64 as int64
from rlgraph.ops.column_types import prompt_tokens as prompt_tokens
from rlgraph.ops.column_types import prompts as prompts
from rlgraph.ops.column_types import samples as samples
from rlgraph.ops.column_types import text as text
from rlgraph.ops.column_types import tokens as tokens
from rlgraph.ops.declare import Loop as Loop
from rlgraph.ops.declare import Loss as Loss
from rlgraph.ops.declare import Parser as Parser
from rlgraph.ops.declare import op as op
from rlgraph.ops.interfaces import Batch as Batch
from rlgraph.ops.interfaces import Context as Context
from rlgraph.ops.interfaces import Enough as Enough
from rlgraph.ops.interfaces import Generation as Generation
from rlgraph.ops.interfaces import Objective as Objective
from rlgraph.ops.interfaces import Request as Request
from rlgraph.ops.interfaces import Sampling as Sampling
from rlgraph.ops.interfaces import ServeEngine as ServeEngine
from rlgraph.ops.interfaces import Tokenizer as Tokenizer
from rlgraph.ops.interfaces import Totals as Totals
from rlgraph.ops.interfaces import TrainEngine as TrainEngine
from rlgraph.ops.tools import ShownTool as ShownTool
from rlgraph.ops.tools import Tool as Tool
