"""`Zero1AdamW` and `Zero1Adam`: the torch.optim.Optimizer face of the package.

Long by its docstrings and by the one list of arguments; every method hands over in a few lines.
"""

from __future__ import annotations

import contextlib
import types
import zlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from .checkpoint import load, save
from .comm.grid import ProcessGrid
from .config import Config, check_groups, check_options
from .memory.report import memory_report
from .step.runner import StepRunner

F = TypeVar("F", bound=Callable[..., Any])

GROUP_OPTIONS = (  # as torch.optim.AdamW has them
    "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
)  # fmt: skip


def _with_default(function: F, **changed: Any) -> F:
    """The same function with other default values."""
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) : code.co_argcount]
    defaults = tuple(changed.get(n, d) for n, d in zip(names, function.__defaults__ or (), strict=True))
    copy = types.FunctionType(code, function.__globals__, function.__name__, defaults, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__qualname__, copy.__doc__ = function.__qualname__, function.__doc__
    return copy  # type: ignore[return-value]


class Zero1AdamW(Optimizer):
    """AdamW with its fp32 state split over N ranks: 4Ψ + 12Ψ/N bytes instead of 16Ψ.

        p *= 1 - lr * weight_decay;  m = lerp(m, g, 1 - beta1);  v = beta2 * v + (1 - beta2) * g * g
        p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

        g is the mean over ranks of each rank's summed gradients; p, m, v are fp32.

    Args:
        params: as torch takes them: tensors, dicts, or (name, tensor) pairs; fp16, bf16, fp32, mixed.
        lr: a float, or a tensor of one element.
        betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW.
        capturable: nothing in a step depends on host values; a tensor lr is read on the device.
        process_group: the ranks that share one state; default: all. Rank 0 below is its first rank.
        replicate_group: ranks that hold the same shard; gradients are averaged over both groups.
        max_grad_norm: clip the global norm on every step.
        skip_nonfinite: a step whose averaged, unscaled gradients are not all finite changes nothing, on any rank.
        master_weights: "fp32", or "split": a bf16 parameter and a 16-bit remainder are the master, 10Ψ/N of state.
        bucket_cap_mb: MiB of gradient per bucket; None: chosen from N, dtype and parameter sizes.
        overlap_reduce: reduce while backward runs (2Ψ/N more memory); False: in place inside step().
        overlap_gather: a module whose forward waits for each bucket's parameters just before it needs them.
        reduce_in_fp32: send 16-bit gradients and sum them in fp32 in rank order; None: where gloo serves the device.
        foreach, fused: taken and ignored; differentiable: must be False.

    Raises:
        ValueError, TypeError: on every rank, if the arguments are wrong on any or ranks pass different parameters.

    Source: ZeRO, Rajbhandari et al. 2020 (stage 1, P_os); Adam, Kingma and Ba 2015; AdamW, Loshchilov and Hutter 2019.

    >>> p = torch.nn.Parameter(torch.ones(2))
    >>> opt = Zero1AdamW([p], lr=0.1, weight_decay=0.0)
    >>> (p * torch.tensor([1.0, -2.0])).sum().backward()
    >>> opt.step()
    >>> p
    Parameter containing:
    tensor([0.9000, 1.1000], requires_grad=True)
    """

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        replicate_group: dist.ProcessGroup | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = True,
        master_weights: str = "fp32",
        bucket_cap_mb: float | None = None,
        overlap_reduce: bool = True,
        overlap_gather: torch.nn.Module | None = None,
        reduce_in_fp32: bool | None = None,
    ) -> None:
        given = locals()
        options = {name: given[name] for name in GROUP_OPTIONS} | {"decoupled_weight_decay": self._decoupled}
        grid = ProcessGrid(process_group, replicate_group)
        error: Exception | None = None
        try:
            config = Config(self._decoupled, **{f.name: given[f.name] for f in fields(Config) if f.name in given})
            check_options(options)
            if differentiable:
                raise ValueError("differentiable=True: autograd through the fused step is not supported")
            super().__init__(params, options)
            check_groups(self.param_groups)
        except Exception as e:
            error = e
        everything = [p for group in self.param_groups for p in group["params"]] if error is None else []
        grid.use_device(next((p.device for p in everything), torch.device("cpu")))
        _agree_on_parameters(grid, self.param_groups if error is None else [], error)
        if all(p.device.type != "meta" for p in everything):
            grid.broadcast_params(everything)
        self._runner = StepRunner(self.param_groups, self.state, config, grid)

    # -- a step ----------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: reduces what has not been reduced, updates this rank's shard, gathers the parameters.

        Args:
            closure: called once, with gradients enabled, before anything else.

        Returns:
            The closure's value, or None.

        Raises:
            ValueError, RuntimeError: something that any rank has found, on every rank; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with torch.no_grad():
                self._runner.step(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        except Exception:
            # GradScaler removes them after a step that returns; left behind, they would scale the next one
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise
        return loss

    # torch.amp.GradScaler hands its scale and its flag over instead of asking the host.
    _step_supports_amp_scaling = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer.zero_grad: `.grad` becomes None, or zeros."""
        super().zero_grad(set_to_none=set_to_none)
        self._runner.zeroed()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backward accumulates gradients locally and sends nothing.

        >>> model = torch.nn.Linear(2, 1)
        >>> opt = Zero1AdamW(model.parameters())
        >>> with opt.no_sync():
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model(torch.ones(1, 2)).sum().backward()  # sends the sum of both
        >>> model.weight.grad
        tensor([[2., 2.]])
        """
        return self._runner.no_sync()

    def clip_grad_norm_(self, max_norm: float, *, grad_scale: Tensor | float | None = None) -> Tensor:
        """Collective: the global norm of the averaged gradients; the next step multiplies them by
        ``min(1, max_norm / (norm + 1e-6))`` inside its kernel. Gradients themselves stay as they are.

        Args:
            max_norm: upper bound of the norm; ``float("inf")`` only measures.
            grad_scale: loss scale that the gradients still carry; the norm is divided by it.

        Returns:
            float32, 0-d, the same on every rank: the norm before clipping, as torch.nn.utils.clip_grad_norm_ has it.

        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> opt = Zero1AdamW([p])
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> opt.clip_grad_norm_(1.0), p.grad  # the clipping waits for the step
        (tensor(5.), tensor([3., 4.]))
        """
        if not float(max_norm) >= 0.0:
            raise ValueError(f"max_norm: at least 0 wanted, got {max_norm!r}")
        with torch.no_grad():
            return self._runner.clip_grad_norm(float(max_norm), grad_scale)

    @property
    def grad_norm(self) -> Tensor | None:
        """float32 0-d: the unscaled norm of the averaged gradients at the last step, if that clipped."""
        return self._runner.last_norm()

    @property
    def skipped_steps(self) -> Tensor:
        """int64 0-d: how many steps were skipped because of non-finite gradients."""
        return self._runner.skipped[0].clone()

    @property
    def step_skipped(self) -> Tensor:
        """bool 0-d: whether the last step was skipped."""
        return self._runner.skipped[1] != 0

    def synchronize(self) -> None:
        """Waits until all parameters are complete (with `overlap_gather`).

        Raises:
            RuntimeError: the last step was stopped on every rank, and changed nothing. (CUDA; the next step says why.)
        """
        self._runner.synchronize()

    def refresh_masters(self) -> None:
        """Masters := weights wherever a weight differs from its rounded master: after edits through ``p.data``.

        Other edits are noticed by themselves. Split masters never differ from their weight by more than a rounding.

        >>> p = torch.nn.Parameter(torch.zeros(2).bfloat16())
        >>> opt = Zero1AdamW([p])
        >>> p.sum().backward()
        >>> opt.step()
        >>> p.data.fill_(3.0)
        tensor([3., 3.], dtype=torch.bfloat16)
        >>> opt.refresh_masters()
        >>> opt.full_param_state(p)["master"]
        tensor([3., 3.])
        """
        self._runner.refresh_masters()

    # -- groups ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer.add_param_group, any time between steps. Collective; rank 0's weights are sent."""
        runner: StepRunner | None = self.__dict__.get("_runner")
        if runner is None:  # inside the constructor, which agrees once for all groups
            super().add_param_group(param_group)
            return
        built = runner.adopt_group()
        error: Exception | None = None
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            check_groups(self.param_groups)
        except Exception as e:
            error = e
        new = [] if error else self.param_groups[count:]
        try:
            built = _agree_on_parameters(runner.grid, new, error, built)
        except Exception:
            del self.param_groups[count:]
            raise
        runner.add_group(self.param_groups[-1], built)

    # -- state -----------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in the form of torch's state_dict(); no collective.

        ``{"state": {0..n-1: {"step", "exp_avg", "exp_avg_sq", "master"[, "max_exp_avg_sq"]}}, "param_groups": [...]}``.
        The tensors work with torch.distributed.checkpoint (save and load, any number of ranks); by torch.save each is
        stored as this rank's plain 1-D part, marked with its rank and world size. As in torch they are the state, and
        not copies; loading into them by DCP gives them memory of their own.
        """
        for pre in self._optimizer_state_dict_pre_hooks.values():
            pre(self)
        self._runner.synchronize()
        with torch.no_grad():
            out = save.local_state_dict(self._runner)
        for post in self._optimizer_state_dict_post_hooks.values():
            out = post(self, out) or out
        return out

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective: takes what state_dict(), full_state_dict() or torch's AdamW/Adam state_dict() gave.

        Everything is copied; afterwards parameters equal their masters on every rank.

        Raises:
            ValueError: on every rank, with nothing changed: a part of another rank or world size, missing, surplus or
                misshapen entries.
        """
        error: Exception | None = None
        try:
            state_dict = dict(state_dict)
            for pre in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = pre(self, state_dict) or state_dict
        except Exception as e:  # a hook that fails here must not leave the other ranks waiting
            error = ValueError(f"load_state_dict: {e}")
        self._runner.prepare()
        with torch.no_grad():
            load.load(self._runner, state_dict, error)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def full_state_dict(self, rank0_only: bool = True) -> dict[str, Any]:
        """Collective: the whole state in the form of torch.optim.AdamW's state_dict(), plus ``master``, on the CPU.

        Rank 0 of process_group gets it, the others `{}`; with ``rank0_only=False`` all do.

        >>> model = torch.nn.Linear(2, 1)
        >>> opt = Zero1AdamW(model.parameters(), lr=0.01)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> opt.step()
        >>> adamw = torch.optim.AdamW(torch.nn.Linear(2, 1).parameters())
        >>> adamw.load_state_dict(opt.full_state_dict())
        >>> adamw.param_groups[0]["lr"]
        0.01
        """
        return self._whole(0 if rank0_only else None)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collective: afterwards state_dict() on rank `to` of process_group is the whole state in torch's form, until
        the next step, load or add_param_group."""
        last = self._runner.grid.world_size - 1
        if not 0 <= to <= last:
            raise ValueError(f"to: a rank of process_group, 0 to {last}, wanted, got {to}")
        self._runner.consolidate(self._whole(to))

    def full_param_state(self, p: Tensor) -> dict[str, Tensor]:
        """Collective: ``{"master", "exp_avg", "exp_avg_sq", "step"[, "max_exp_avg_sq"]}`` of one parameter, whole.

        Copies, fp32, in p's shape, on its device; step is 0-d. Zeros before the first step. ValueError for a tensor
        that is not a parameter here or has never been trainable.

        >>> p = torch.nn.Parameter(torch.ones(2).bfloat16())
        >>> Zero1AdamW([p]).full_param_state(p)["master"]
        tensor([1., 1.])
        """
        with torch.no_grad():
            out = save.param_state(self._runner.with_edits(), p)
        assert out is not None
        return out

    def _whole(self, to: int | None) -> dict[str, Any]:
        with torch.no_grad():
            return save.whole_state_dict(self._runner.with_edits(), to)

    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank: params, grads, state, buffers, total (their sum), padding (part of them), predicted.

        Addresses are counted once; before the first step, what will be allocated. predicted: params + grads + state by
        formula, for 16-bit parameters 2Ψ + 2Ψ + 12Ψ/N.

        >>> report = Zero1AdamW([torch.nn.Parameter(torch.zeros(1024).bfloat16())]).memory_report()
        >>> report["params"], report["grads"], report["state"], report["predicted"]
        (2048, 2048, 12288, 16384)
        """
        return memory_report(self._runner)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it shares buffers with its parameters and belongs "
            "to a process group. Use state_dict() or full_state_dict() and make a new optimizer"
        )


class Zero1Adam(Zero1AdamW):
    """Adam with L2 decay and its fp32 state split over N ranks; arguments, errors and all else as Zero1AdamW.

        g += weight_decay * p;  m = lerp(m, g, 1 - beta1);  v = beta2 * v + (1 - beta2) * g * g
        p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    >>> p = torch.nn.Parameter(torch.ones(2))
    >>> opt = Zero1Adam([p], lr=0.1, weight_decay=0.5)
    >>> (p * torch.tensor([1.0, -2.0])).sum().backward()
    >>> opt.step()
    >>> p
    Parameter containing:
    tensor([0.9000, 1.1000], requires_grad=True)
    """

    _decoupled = False
    __init__ = _with_default(Zero1AdamW.__init__, weight_decay=0.0)


def _agree_on_parameters(
    grid: ProcessGrid, groups: list[dict[str, Any]], error: Exception | None, built: bool = False
) -> bool:
    """Collective: ValueError on every rank if parameters differ or any rank has an error; -> whether any has built.

    The rank that has the error raises it as it is, after the others have been told.
    """
    if grid.is_single:
        if error is not None:
            raise error
        return built
    told = [[(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]] for group in groups]
    digest = zlib.crc32(repr(told).encode())
    rows = grid.gather_integers([digest, int(error is not None), int(built)])
    failed = [r for r, row in enumerate(rows) if row[1]]
    if failed or any(row[0] != rows[0][0] for row in rows):
        reports = grid.gather_objects(str(error) if error else told)
        if error is not None:
            raise error
        if failed:
            raise ValueError("; ".join(f"rank {r}: {reports[r]}" for r in failed))
        raise ValueError(f"ranks pass different parameters: {_first_difference(reports)}")
    return any(row[2] for row in rows)


def _first_difference(reports: list[list[list[Any]]]) -> str:
    mine = reports[0]
    for r, other in enumerate(reports):
        if [len(g) for g in other] != [len(g) for g in mine]:
            return f"rank 0 has groups of {[len(g) for g in mine]}, rank {r} of {[len(g) for g in other]}"
        for g, (a, b) in enumerate(zip(mine, other, strict=True)):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                if x != y:
                    return (
                        f"parameter {i} of group {g} is (shape, dtype, requires_grad) {x} on rank 0 and {y} on rank {r}"
                    )
    return "they differ in order"
