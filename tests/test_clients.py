"""Real clients train with the optimizer, clip, save and resume: transformers' Trainer, Lightning and accelerate.

Each example runs under torchrun on two gloo ranks. Its weights are compared with those of the same client with
torch.optim.AdamW under DDP: as it is, and without DDP as docs/clients.md has it (its code blocks are what runs). A
resumed run ends in the bits of the unbroken one. Trainer and accelerate left alone save one rank's part: every rank
refuses it.

pytest starts two processes per client and step of the story, as clients start slowly: torchrun runs this file as a
script, `python test_clients.py CASE FOLDER`, and the cases are the functions `case_*`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
STEPS, HALF, EPOCHS = 8, 4, 2
EPS = 1e-4  # of the gradients' size: Adam hides a wrong factor behind a smaller one
LR = 1e-2


# -- in the ranks -----------------------------------------------------------------------------------------------------


class Plain(torch.optim.AdamW):
    """torch's AdamW, with the two calls that the examples make to save."""

    def full_state_dict(self) -> dict[str, Any]:
        return self.state_dict()

    def consolidate_state_dict(self) -> None:
        pass


def recipes() -> dict[str, Any]:
    """What the code blocks of docs/clients.md define whose client is here."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (HERE.parent / "docs" / "clients.md").read_text(), re.DOTALL):
        with contextlib.suppress(ModuleNotFoundError):
            exec(block, names)
    return names


def example(name: str, optimizer: Any, out: Path, resume: Path | None = None, **others: Any) -> str:
    """Runs an example with another optimizer, and maybe with other names changed; -> what it raised."""
    length = ["--epochs", EPOCHS] if name == "lightning_module" else ["--steps", STEPS]
    arguments = [*length, "--out", out, *(["--resume", resume] if resume else [])]
    module = importlib.import_module(name)
    kept, argv = dict(vars(module)), sys.argv
    vars(module).update(others, Zero1AdamW=functools.partial(optimizer, eps=EPS))
    sys.argv = [name, *map(str, arguments)]
    try:
        module.main()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        vars(module).update(kept)
        sys.argv = argv
    return ""


@contextlib.contextmanager
def forbid_ddp() -> Any:
    """Inside, wrapping a model in DistributedDataParallel is an error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("DDP was to be left out")

    ddp = torch.nn.parallel.DistributedDataParallel
    kept, ddp.__init__ = ddp.__init__, refuse
    try:
        yield
    finally:
        ddp.__init__ = kept


def refused(folder: Path, told: str) -> None:
    """Keeps what this rank was told when it loaded rank 0's part."""
    (folder / f"refused-{os.environ['RANK']}.txt").write_text(told)


def case_trainer(out: Path) -> None:
    from transformers import Trainer

    from zero1_cuda import Zero1AdamW

    class WithoutDDP(recipes()["NoDDPTrainer"], recipes()["WholeStateTrainer"]):
        pass

    example("trainer", Plain, out / "adamw")
    example("trainer", Zero1AdamW, out / "zero1")
    with forbid_ddp():
        example("trainer", Zero1AdamW, out / "no_ddp", WholeStateTrainer=WithoutDDP)
    example("trainer", Zero1AdamW, out / "part", WholeStateTrainer=Trainer)


def case_trainer_resume(out: Path) -> None:
    from transformers import Trainer

    from zero1_cuda import Zero1AdamW

    at = f"checkpoint-{HALF}"
    told = example("trainer", Zero1AdamW, out / "part", out / "part" / at, WholeStateTrainer=Trainer)
    refused(out, told)
    assert not example("trainer", Zero1AdamW, out / "resumed", out / "zero1" / at)
    assert not example("trainer", Zero1AdamW, out / "from_adamw", out / "adamw" / at)
    assert not example("trainer", Plain, out / "to_adamw", out / "zero1" / at)


def case_accelerate(out: Path) -> None:
    from accelerate import Accelerator

    from zero1_cuda import Zero1AdamW

    class WithoutDDP(Accelerator):
        def prepare(self, model: Any, opt: Any, *others: Any, **kwargs: Any) -> Any:
            if not isinstance(model, torch.nn.Module):
                return super().prepare(model, opt, *others, **kwargs)
            self.opt = opt
            return recipes()["prepare_without_ddp"](self, model, opt, *others)

        def clip_grad_norm_(self, parameters: Any, max_norm: float) -> Any:
            return self.opt.clip_grad_norm_(max_norm)

    class Part(Zero1AdamW):
        def consolidate_state_dict(self, to: int = 0) -> None:
            pass

    Accelerator.end_training = lambda self: None  # the process group is needed again
    example("accelerate_loop", Plain, out / "adamw")
    example("accelerate_loop", Zero1AdamW, out / "zero1")
    with forbid_ddp():
        example("accelerate_loop", Zero1AdamW, out / "no_ddp", Accelerator=WithoutDDP)
    example("accelerate_loop", Part, out / "part")


def case_accelerate_resume(out: Path) -> None:
    from accelerate import Accelerator

    from zero1_cuda import Zero1AdamW

    Accelerator.end_training = lambda self: None
    refused(out, example("accelerate_loop", Zero1AdamW, out / "part", out / "part" / "half"))
    assert not example("accelerate_loop", Zero1AdamW, out / "resumed", out / "zero1" / "half")
    assert not example("accelerate_loop", Zero1AdamW, out / "from_adamw", out / "adamw" / "half")
    assert not example("accelerate_loop", Plain, out / "to_adamw", out / "zero1" / "half")


def case_lightning(out: Path) -> None:
    import lightning as L

    from zero1_cuda import Zero1AdamW

    names = recipes()
    module = importlib.import_module("lightning_module")

    class WithoutDDP(names["NoDDPModule"], module.Regression):
        pass

    class Trainer(L.Trainer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{**kwargs, "strategy": names["NoDDPStrategy"]()})

    lightning = type("lightning", (), {**vars(L), "Trainer": Trainer})
    example("lightning_module", Plain, out / "adamw")
    example("lightning_module", Zero1AdamW, out / "zero1")
    with forbid_ddp():
        example("lightning_module", Zero1AdamW, out / "no_ddp", Regression=WithoutDDP, L=lightning)


def case_lightning_resume(out: Path) -> None:
    from zero1_cuda import Zero1AdamW

    at = "epoch=0.ckpt"
    assert not example("lightning_module", Zero1AdamW, out / "resumed", out / "zero1" / at)
    assert not example("lightning_module", Zero1AdamW, out / "from_adamw", out / "adamw" / at)
    assert not example("lightning_module", Plain, out / "to_adamw", out / "zero1" / at)


# -- in pytest --------------------------------------------------------------------------------------------------------


def torchrun(case: str, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [*command, __file__, case, str(folder)],
            env=environment,
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{case} hangs\n{(error.stdout or b'')[-4000:].decode()}") from None
    assert done.returncode == 0, done.stdout[-8000:]


def story(name: str, folder: Path) -> Path:
    torchrun(name, folder)
    torchrun(f"{name}_resume", folder)
    return folder


def close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal to rounding, every tensor of both."""
    assert got.keys() == wanted.keys()
    for name, t in wanted.items():
        bound = 1e-3 * LR + 1e-6 * float(t.abs().max())
        torch.testing.assert_close(got[name], t, rtol=0.0, atol=bound, msg=lambda m, name=name: f"{name}: {m}")


def same(got: Any, wanted: Any) -> None:
    """Equal to the bit, however nested."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            same(got[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            same(a, b)
    elif torch.is_tensor(wanted):
        assert torch.equal(got, wanted)
    else:
        assert got == wanted


def part_refused(folder: Path) -> None:
    for rank in range(2):
        told = (folder / f"refused-{rank}.txt").read_text()
        assert told.startswith("ValueError")
        assert "full_state_dict()" in told


def whole(state: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """An optimizer state as torch's AdamW has it, with masters that are the weights."""
    named = dict(
        zip((n for g in state["param_groups"] for n in g["param_names"]), state["state"].values(), strict=True)
    )
    for name, entry in named.items():
        assert entry.keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
        assert entry["exp_avg"].shape == weights[name].shape
        assert torch.equal(entry["master"], weights[name])
        assert entry["exp_avg_sq"].count_nonzero()


# ---- Trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return story("trainer", tmp_path_factory.mktemp("trainer"))


def trainer_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def trainer_norms(folder: Path) -> list[float]:
    log = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [entry["grad_norm"] for entry in log if "grad_norm" in entry]


@pytest.mark.parametrize("run", ["zero1", "no_ddp"])
def test_trainer_trains_as_with_adamw(trainer, run):
    close(trainer_weights(trainer / run), trainer_weights(trainer / "adamw"))
    assert trainer_norms(trainer / run) == pytest.approx(trainer_norms(trainer / "adamw"), rel=1e-5)


def test_trainer_resumes_to_the_bit(trainer):
    last = f"checkpoint-{STEPS}"
    same(trainer_weights(trainer / "resumed"), trainer_weights(trainer / "zero1"))
    states = [torch.load(trainer / run / last / "optimizer.pt", weights_only=True) for run in ("resumed", "zero1")]
    same(*states)
    assert trainer_norms(trainer / "resumed") == trainer_norms(trainer / "zero1")


def test_trainer_optimizer_file_is_whole(trainer):
    at = trainer / "zero1" / f"checkpoint-{HALF}"
    whole(torch.load(at / "optimizer.pt", weights_only=True), trainer_weights(at))


@pytest.mark.parametrize("run", ["from_adamw", "to_adamw"])
def test_trainer_goes_on_with_the_other_optimizer(trainer, run):
    close(trainer_weights(trainer / run), trainer_weights(trainer / "adamw"))


def test_trainer_alone_saves_a_part_and_every_rank_refuses_it(trainer):
    part_refused(trainer)
    close(trainer_weights(trainer / "part"), trainer_weights(trainer / "adamw"))


# ---- accelerate


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory):
    pytest.importorskip("accelerate")
    pytest.importorskip("safetensors")
    return story("accelerate", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize("run", ["zero1", "no_ddp", "from_adamw", "to_adamw"])
def test_accelerate_trains_as_with_adamw(accelerate, run):
    close(trainer_weights(accelerate / run), trainer_weights(accelerate / "adamw"))


def test_accelerate_resumes_to_the_bit(accelerate):
    same(trainer_weights(accelerate / "resumed"), trainer_weights(accelerate / "zero1"))


def test_accelerate_save_state_is_whole_and_save_model_keeps_every_weight(accelerate):
    at = accelerate / "zero1" / "half"
    state = torch.load(at / "optimizer.bin", weights_only=True)
    weights = trainer_weights(at)
    assert len(weights) == len(state["state"]) == 6
    whole(state, {name.removeprefix("module."): t for name, t in weights.items()})
    assert len(trainer_weights(accelerate / "zero1")) == 6


def test_accelerate_alone_saves_a_part_and_every_rank_refuses_it(accelerate):
    part_refused(accelerate)


# ---- Lightning


@pytest.fixture(scope="module")
def lightning(tmp_path_factory):
    pytest.importorskip("lightning")
    return story("lightning", tmp_path_factory.mktemp("lightning"))


def lightning_file(folder: Path, epoch: int = EPOCHS - 1) -> dict[str, Any]:
    return torch.load(folder / f"epoch={epoch}.ckpt", weights_only=True)


@pytest.mark.parametrize("run", ["zero1", "no_ddp", "from_adamw", "to_adamw"])
def test_lightning_trains_as_with_adamw(lightning, run):
    close(lightning_file(lightning / run)["state_dict"], lightning_file(lightning / "adamw")["state_dict"])


def test_lightning_resumes_to_the_bit(lightning):
    resumed, unbroken = (lightning_file(lightning / run) for run in ("resumed", "zero1"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        same(resumed[part], unbroken[part])


def test_lightning_consolidates_by_itself(lightning):
    file = lightning_file(lightning / "zero1", 0)
    whole(file["optimizer_states"][0], file["state_dict"])


# ---- what docs/clients.md says of skipped steps


def test_a_schedule_that_asks_the_optimizer_holds_on_a_skipped_step():
    from zero1_cuda import Zero1AdamW

    p = torch.nn.Parameter(torch.ones(4))
    opt = Zero1AdamW([p], lr=LR)
    schedule = recipes()["HoldingCosine"](opt, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    rates = []
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((p * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
        schedule.step()
        opt.zero_grad()
        rates.append(opt.param_groups[0]["lr"])
    assert LR > rates[0] == rates[1] > rates[2]


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "examples"))
    globals()[f"case_{sys.argv[1]}"](Path(sys.argv[2]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
