"""Which weights did training start from? The same model without its adapter, or else a frozen copy that checkpoints take along."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightningrl.models.dense import DenseModel


class Reference:
    """Of a model as it is at construction. What is copied is saved with every checkpoint: a run that goes on may have been started from others."""

    def __init__(self, model: DenseModel) -> None:
        self._model = model
        self._adapters = _adapters(model)
        self._copy = None if self._adapters else DenseModel(copy.deepcopy(model.hf).requires_grad_(False))

    @contextmanager
    def model(self) -> Iterator[DenseModel]:
        """The model to ask. Nobody else may use the trained one meanwhile."""
        if self._copy is not None:
            yield self._copy
            return
        for layer in self._adapters:
            layer.enable_adapters(False)
        try:
            yield self._model
        finally:
            for layer in self._adapters:
                layer.enable_adapters(True)

    def parameters(self) -> Mapping[str, Tensor]:
        """What a checkpoint must hold of it: nothing where the trained model has an adapter, as what is below never changes."""
        return {} if self._copy is None else dict(self._copy.hf.named_parameters())


def _adapters(model: DenseModel) -> list[Any]:
    """The layers of a model whose weights are frozen and that learns by an adapter."""
    if all(p.requires_grad for p in model.hf.parameters()):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer  # slow to import, and needed only here

    return [module for module in model.hf.modules() if isinstance(module, BaseTunerLayer)]
