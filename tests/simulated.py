"""A GPU that does not exist: its tensors say that they are on `cuda:0`, and have real values in the host's memory.

Inside `simulated_gpu()`, `.to(GPU)` and factories with `device=GPU` make `OnDevice` tensors. Every operation computes
real values, which can be compared with the CPU's. An operation that mixes tensors of both devices raises, as on a real
GPU: only numbers (tensors without dimensions) may come from the host, and copies may go across. The host's waits for
values are counted. While `strict` is set, a factory that makes a tensor on the host raises, too.

It says nothing about the kernels, the speed and the memory of a real GPU.
"""

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten: Any = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
INSIDE = torch.device("privateuseone", 0)
"""The device's name within torch, whose CPU build knows no `cuda`."""
FREE = 1 << 33
"""Bytes of the device's memory, all of them free."""
ACROSS = {aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default}
"""Operations between host and device."""


def has_gpu() -> bool:
    return torch.cuda.is_available()


class OnDevice(Tensor):
    """A tensor on the simulated GPU."""

    inner: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """The values, in the host's memory."""

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "OnDevice":
        with torch.inference_mode(mode=False):  # views of a tensor from outside of inference mode are none of its own
            made: Any = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=INSIDE,
                requires_grad=requires_grad,
            )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return GPU

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The host's storage, by whose address libraries recognise tensors that share it."""
        return self.inner.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the simulated GPU outside of `simulated_gpu()`")


class Simulation(TorchDispatchMode):
    """Computes on the simulated GPU, and watches what crosses over."""

    def __init__(self) -> None:
        super().__init__()
        self.strict = False
        self.waits: Counter[str] = Counter()
        """Operation → how often it made the host wait for the device."""
        self.uploads = 0
        """Copies from the host to the device."""
        self.emptied = 0
        """How often unused memory was given back."""
        self.lock = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        composed, aliasing = _facts(func)
        if composed:  # in inference mode, operations arrive whole
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        here = [x for x in tensors if isinstance(x, OnDevice)]
        if here and func not in ACROSS:
            strangers = [x for x in tensors if x.dim() and not isinstance(x, OnDevice)]
            assert not strangers, f"{func} mixes tensors of the device with one of the host, {strangers}"
        wanted = kwargs.get("device")
        target = torch.device(wanted) if wanted is not None else None
        result = func(*map(_inner, args), **{name: _on_the_host(name, value) for name, value in kwargs.items()})
        if func is aten._local_scalar_dense.default:
            self.waits["item"] += bool(here)
            return result
        if func is aten._to_copy.default:
            return self._moved(args[0], result, target)
        if func is aten.copy_.default:
            self._across(args[0], args[1])
            return args[0]
        on_device = bool(here) if target is None else target.type in (GPU.type, INSIDE.type)
        if not on_device:
            made = self.strict and not tensors and isinstance(result, Tensor)
            assert not made, f"{func} makes a tensor on the default device"
            return result
        wrapped = pytree.tree_map(lambda x: OnDevice(x) if isinstance(x, Tensor) else x, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if aliasing else wrapped

    def empty(self) -> None:
        self.emptied += 1

    def _moved(self, source: Tensor, result: Tensor, target: torch.device | None) -> Tensor:
        target = source.device if target is None else target
        if target.type in (GPU.type, INSIDE.type):
            if not isinstance(source, OnDevice):
                self.uploads += 1
                result = result.clone() if result is source else result
            return OnDevice(result)
        if isinstance(source, OnDevice):
            self.waits["copy to the host"] += 1
        return result

    def _across(self, target: Tensor, source: Tensor) -> None:
        if isinstance(target, OnDevice) and not isinstance(source, OnDevice):
            self.uploads += 1
        if isinstance(source, OnDevice) and not isinstance(target, OnDevice):
            self.waits["copy to the host"] += 1


@functools.cache
def _facts(func: Any) -> tuple[bool, bool]:
    """Whether an operation is made of others, and whether it changes or returns one of its arguments."""
    return func._can_decompose(), any(argument.alias_info is not None for argument in func._schema.arguments)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _inner(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.inner
    return [_inner(one) for one in x] if isinstance(x, list | tuple) else x


def _on_the_host(name: str, value: Any) -> Any:
    return CPU if name == "device" and value is not None else _inner(value)


@contextlib.contextmanager
def simulated_gpu() -> Iterator[Simulation]:
    """Compute on the simulated GPU within the block."""
    settings: Any = torch.__future__
    overwrites = settings.get_overwrite_module_params_on_conversion()
    simulation = Simulation()
    _register()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "_lazy_init", lambda: None))
        stack.enter_context(mock.patch.object(torch.cuda, "empty_cache", simulation.empty))
        stack.enter_context(mock.patch.object(torch.cuda, "mem_get_info", lambda device: (FREE, FREE)))
        # transformers would load in threads that are in no mode
        stack.enter_context(mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        stack.callback(settings.set_overwrite_module_params_on_conversion, overwrites)
        settings.set_overwrite_module_params_on_conversion(True)  # `.data = …` would leave `inner` as it was
        stack.enter_context(entered(simulation))
        yield simulation


class _Module(backend_registration._DummyBackendModule):
    """What torch asks for a device, even where a later test computes on the CPU."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@functools.cache
def _register() -> None:
    """Make torch take `INSIDE` for a device, from now on in this process."""
    _setup_privateuseone_for_python_backend(rename="simulated", backend_module=_Module())


@contextlib.contextmanager
def entered(simulation: Simulation) -> Iterator[None]:
    """The simulation in this thread."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # so that `torch.tensor(…, device=GPU)` is a copy that a mode sees
    try:
        with simulation:
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def thread_in(simulation: Simulation) -> type[threading.Thread]:
    """A `Thread` that computes in the simulation."""

    class Simulated(threading.Thread):
        def run(self) -> None:
            with entered(simulation):
                super().run()

    return Simulated
