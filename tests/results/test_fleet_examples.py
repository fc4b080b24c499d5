"""The examples for Kubernetes and GitHub Actions have the shape those systems ask for, and commands we have.

Neither was run where it belongs: this is what can be held here.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from moe_routing_bench.cli import command_of
from moe_routing_bench.fleet.shards import Shard
from repository import ROOT

yaml = pytest.importorskip("yaml")
FLEET = ROOT / "examples" / "fleet"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Amounts(Strict):
    cpu: str
    memory: Annotated[str, Field(pattern=r"^\d+(Ki|Mi|Gi|Ti)$")]


class Resources(Strict):
    requests: Amounts
    limits: Amounts


class Container(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    image: str
    command: list[str]
    envFrom: list[dict[Literal["secretRef", "configMapRef"], dict[Literal["name"], str]]]
    resources: Resources


class PodSpec(Strict):
    restartPolicy: Literal["Never", "OnFailure"]  # a Job allows no other
    containers: Annotated[list[Container], Field(min_length=1)]


class Template(Strict):
    spec: PodSpec


class JobSpec(Strict):
    completions: Annotated[int, Field(ge=1)]
    parallelism: Annotated[int, Field(ge=1, le=100_000)]
    completionMode: Literal["Indexed"]
    backoffLimit: Annotated[int, Field(ge=0)]
    template: Template


class Job(Strict):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: dict[Literal["name"], str]
    spec: JobSpec


class Step(Strict):
    uses: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+@v\d+$")] | None = None
    run: str | None = None
    inputs: Annotated[dict[str, str] | None, Field(alias="with")] = None


class Strategy(Strict):
    fail_fast: Annotated[bool, Field(alias="fail-fast")]
    matrix: dict[str, list[int]]


class ActionsJob(Strict):
    runs_on: Annotated[str, Field(alias="runs-on")]
    steps: list[Step]
    needs: str | None = None
    strategy: Strategy | None = None


class Workflow(Strict):
    name: str
    on: str
    permissions: dict[str, Literal["read", "write", "none"]]
    jobs: dict[str, ActionsJob]


def test_the_kubernetes_job_measures_every_cell_once():
    job = Job.model_validate(yaml.safe_load((FLEET / "kubernetes.yaml").read_text()))
    (container,) = job.spec.template.spec.containers
    assert container.resources.requests == container.resources.limits
    words = container.command
    text = words[words.index("--shard") + 1]
    shards = [Shard.parse(text, {"JOB_COMPLETION_INDEX": str(n)}) for n in range(job.spec.completions)]
    assert sorted(cell for shard in shards for cell in shard.part(range(100))) == list(range(100))
    assert words[0] == "mrb" and words[words.index("--out") + 1].startswith("s3://")
    assert command_of(["sweep"])[0].make_context("sweep", words[2:]).params["shard"] == text


def test_the_actions_matrix_measures_every_cell_once_and_merges_all():
    document: dict[Any, Any] = yaml.safe_load((FLEET / "github_actions.yml").read_text())
    document["on"] = document.pop(True)  # YAML 1.1 reads the word on as true
    workflow = Workflow.model_validate(document)
    measure, merge = workflow.jobs["measure"], workflow.jobs["merge"]
    assert merge.needs == "measure" and measure.strategy is not None
    shards = measure.strategy.matrix["shard"]
    (sweep,) = [step.run for step in measure.steps if step.run and step.run.startswith("mrb")]
    of = int(re.findall(r"/(\d+)", sweep)[-1])
    assert shards == list(range(1, of + 1))
    for step in (*measure.steps, *merge.steps):
        assert (step.uses is None) != (step.run is None)
        if step.run and step.run.startswith("mrb"):
            assert not hasattr(command_of(shlex.split(step.run)[1:])[0], "commands")  # a command, not a group


def test_the_slurm_script_is_of_the_same_words():
    text = (FLEET / "slurm.sh").read_text()
    assert re.search(r"^#SBATCH --array=1-4", text, re.M) and "--shard auto" in text
