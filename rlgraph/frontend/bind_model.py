"""Binds a model: validates its section, also by what its engines take, and settles it for the devices."""

import os
import re
from typing import Any

from rlgraph.engines.registry import EMBEDDED, REFUSED, SERVERS, SERVING
from rlgraph.frontend.bind_call import resolved
from rlgraph.ir.graph import Model
from rlgraph.ir.schedules import rate_course
from rlgraph.laws.models import MODEL_LAWS
from rlgraph.laws.views import ModelView, is_changed
from rlgraph.syntax.model_settings import ModelSection, Serve
from rlgraph.syntax.source import Tree
from rlgraph.syntax.validate import Binder, validate
from rlgraph.variables import with_values

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*$")


def bind_model(name: str, tree: Tree, device: str, binder: Binder) -> Model | None:
    """Return a model, or None with the problems noted and its name among the broken ones."""
    tree, rate = rate_course(tree, f"models.{name}", binder)
    spec = validate(ModelSection, tree, f"models.{name}", binder)
    if spec is None:
        binder.broken.add(name)
        return None
    spec = on_device(spec, device)
    view = ModelView(name, spec, tree)
    for law in MODEL_LAWS:
        binder.problems += law(view)
    path = resolved(spec.path, tree.items["path"].mark)
    may_be_hub_id = HUB_ID.match(with_values(spec.path))
    if may_be_hub_id and not os.path.exists(with_values(path)):
        path = spec.path
    return Model(name, path, spec, tree.key or tree.mark, rate)


def on_device(spec: ModelSection, device: str) -> ModelSection:
    """Return a model with the data types and the engine that are ``auto`` settled for ``cuda`` or ``cpu``.

    Example:
        >>> model = on_device(ModelSection(path="some/model"), "cuda")
        >>> model.serve.engine, model.serve.dtype, model.train.dtype
        ('sglang', 'bfloat16', 'bfloat16')
    """
    serve, train = spec.serve, spec.train
    dtype = "bfloat16" if device == "cuda" else "float32"
    serve_update: dict[str, Any] = {}
    if serve.engine == "auto":
        needs_servers = device == "cuda" or _needs_servers(serve)
        serve_update["engine"] = SERVERS if needs_servers else EMBEDDED
    if serve.dtype == "auto":
        serve_update["dtype"] = dtype
    train_update: dict[str, Any] = {}
    if train.dtype == "auto":
        train_update["dtype"] = dtype
    if train.activation_offload and train.recompute == "auto":
        train_update["recompute"] = True
    settled = {
        "serve": serve.model_copy(update=serve_update),
        "train": train.model_copy(update=train_update),
    }
    return spec.model_copy(update=settled)


def _needs_servers(serve: Serve) -> bool:
    """Return whether a serve section has settings that only servers of the run's own take."""
    if any(is_changed(serve, key) for key in REFUSED):
        return True
    settings = getattr(serve, SERVERS)
    return any(is_changed(settings, key) for key in SERVING[SERVERS].claims)
