"""Everything that is to be measured on an H200, in stages that can be taken up again.

    python3 benchmarks/h200/run.py --out FOLDER --wheels DIR --hardware-note TEXT

See README.md beside this file. Needs the standard library of Python 3.11 only; no network where
`--wheels` has what is to be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GUARD = ROOT / "envs" / "backends" / "live" / "guard.py"
VLLM_VERSION = "0.32.0"
READY_TIMEOUT_S = 1200.0
LAST_LINES = 15

# Runs in the client's environment: the scenario with the episode's length, and the arguments of
# `vllm serve` that its engine section says.
SCENARIO = """
import json, sys, yaml
from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.backends.live.server import engine_arguments
scenario = load_scenario(sys.argv[1])
content = scenario.model_dump(mode="json")
content["control"]["episode_s"] = float(sys.argv[2])
with open(sys.argv[3], "w", encoding="utf-8") as file:
    yaml.safe_dump(content, file, sort_keys=False)
load_scenario(sys.argv[3])
with open(sys.argv[4], "w", encoding="utf-8") as file:
    json.dump(engine_arguments(scenario.engine), file)
"""


@dataclass(frozen=True)
class Target:
    """What is measured.

    Attributes:
        shape: of the model, one of make_shape.py's.
        profile: the packaged profile that measured steps are compared with.
        scenario: what validation and protocol play.
        episode_s: of both.
        policies, seeds: of the protocol.
        serve: further arguments of `vllm serve`.
        protocol: further arguments of the protocol.
        calibrate: further arguments of the calibration.
        environment: of the server.
    """

    shape: str
    profile: str
    scenario: str
    episode_s: float
    policies: str
    seeds: str
    serve: tuple[str, ...] = ()
    protocol: tuple[str, ...] = ()
    calibrate: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


H200 = Target(
    shape="llama-3.1-8b",
    profile="h200-llama-3.1-8b",
    scenario="h200_chat_batch",
    episode_s=480.0,  # two periods of the chat's bursts
    policies="static:256/3,naive,differentiated",
    seeds="0:10",
)
CPU_SMALL = Target(
    shape="small",
    profile="cpu-90m",
    scenario="cpu_chat_batch",
    episode_s=10.0,
    policies="static,naive",
    seeds="0:1",
    serve=("--enforce-eager",),
    protocol=("--warm-up-s", "4", "--cool-down-s", "1"),
    calibrate=("--rounds", "1"),
    environment=(("VLLM_CPU_KVCACHE_SPACE", "1"),),
)


class StageError(Exception):
    """A stage that failed, and what is to be said of it."""


class Runner:
    """Runs stages and knows which have been run.

    Args:
        options: of the command line.
        target: what is measured.

    Attributes:
        stage: the one that runs.
    """

    def __init__(self, options: argparse.Namespace, target: Target) -> None:
        self._options = options
        self._target = target
        self._out = Path(options.out).absolute()
        self._records = self._out / "records"
        self._logs = self._records / "logs"
        self.stage = ""
        self._server: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._logs.mkdir(parents=True, exist_ok=True)

    @property
    def _model(self) -> Path:
        return self._out / "model"

    @property
    def _python(self) -> str:
        return self._options.python or str(self._out / "venv" / "bin" / "python")

    @property
    def _vllm(self) -> str:
        return self._options.vllm or str(self._out / "venv-vllm" / "bin" / "vllm")

    @property
    def _client(self) -> list[str]:
        start = "from vllm_tenant_tuning.baselines.cli import main; raise SystemExit(main())"
        return [self._python, "-c", start]

    def run(self) -> None:
        """Run what is left, and end the server whatever happens."""
        stages: list[tuple[str, Callable[[], None]]] = [
            ("install", self.install),
            ("environment", self.environment),
            ("model", self.model),
            ("scenario", self.scenario),
            ("calibrate", self.calibrate),
            ("compare", self.compare),
            ("validate", self.validate),
            ("protocol", self.protocol),
            ("pack", self.pack),
        ]
        try:
            for name, stage in stages:
                done = self._out / "done" / name
                if done.exists():
                    print(f"{name}: done before", flush=True)
                    continue
                if name in self._options.skip:
                    print(f"{name}: skipped", flush=True)
                    continue
                self.stage = name
                began_s = time.monotonic()
                print(f"{name}: begins; its output: {self._log}", flush=True)
                stage()
                done.parent.mkdir(exist_ok=True)
                done.write_text(f"{time.monotonic() - began_s:.1f} s\n")
                print(f"{name}: {time.monotonic() - began_s:.1f} s", flush=True)
        finally:
            self.stop_server()

    def install(self) -> None:
        """vLLM and the client, each into an environment of its own: vLLM pins much."""
        source = (
            ["--no-index", "--find-links", self._options.wheels] if self._options.wheels else []
        )
        packages = (
            ("venv-vllm", self._options.vllm, [f"vllm=={VLLM_VERSION}"]),
            (
                "venv",
                self._options.python,
                ["-c", str(ROOT / "constraints.txt"), "vllm-tenant-tuning[live,report]"],
            ),
        )
        for name, given, wanted in packages:
            if given:
                continue
            if name == "venv" and not source:
                wanted[-1] = f"{ROOT}[live,report]"
            self._call([sys.executable, "-m", "venv", str(self._out / name)])
            python = str(self._out / name / "bin" / "python")
            self._call([python, "-m", "pip", "install", *source, *wanted])

    def environment(self) -> None:
        """What all of this ran on."""
        vllm_python = self._vllm_python()
        asked = {
            "gpu": ["nvidia-smi", "-q"],
            "cpu": ["lscpu"],
            "kernel": ["uname", "-a"],
            "vllm_packages": [vllm_python, "-m", "pip", "freeze"],
            "client_packages": [self._python, "-m", "pip", "freeze"],
            "commit": ["git", "-C", str(ROOT), "rev-parse", "HEAD"],
        }
        content = {"hardware_note": self._options.hardware_note}
        for name, command in asked.items():
            try:
                found = subprocess.run(command, capture_output=True, text=True, timeout=120)
                content[name] = found.stdout if found.returncode == 0 else found.stderr
            except OSError as error:
                content[name] = f"not available: {error}"
        file = self._records / "environment.json"
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def model(self) -> None:
        """The model's shape and tokenizer; its weights are random and made by vLLM."""
        script = str(HERE / "make_shape.py")
        self._call([self._vllm_python(), script, self._target.shape, str(self._model)])

    def scenario(self) -> None:
        """The scenario with the episode's length, and what it says of the server."""
        episode_s = self._options.episode_s or self._target.episode_s
        files = [self._records / "scenario.yaml", self._records / "serve.json"]
        arguments = [self._target.scenario, str(episode_s), *map(str, files)]
        self._call([self._python, "-c", SCENARIO, *arguments])

    def calibrate(self) -> None:
        """Measure steps, and fit a profile to them."""
        profile = self._records / "profile.yaml"
        trials = self._trials
        if trials.exists():  # of a calibration that was cut off: it is measured anew
            old = trials.with_suffix(f".{int(trials.stat().st_mtime)}.old")
            trials.rename(old)
        self._call(
            [
                *self._client,
                *("calibrate", "--url", self._serve(), "--out", str(profile)),
                *("--template", self._target.profile),
                *("--name", f"{self._target.profile}-measured", *self._target.calibrate),
            ]
        )

    def compare(self) -> None:
        """Hold the packaged profile against the measured steps."""
        script = str(HERE / "compare_profile.py")
        out = self._records / "compare.json"
        self._call([self._python, script, str(self._trials), self._target.profile, str(out)])

    def validate(self) -> None:
        """Play the same requests and caps in simulation and live."""
        self._call(
            [
                *self._client,
                *("validate", "--url", self._serve()),
                *("--scenario", str(self._records / "scenario.yaml")),
                *("--profile", str(self._records / "profile.yaml")),
                *("--out", str(self._records / "validate")),
            ]
        )

    def protocol(self) -> None:
        """Measure the policies."""
        self._call(
            [
                *self._client,
                *("protocol", "--url", self._serve()),
                *("--scenario", str(self._records / "scenario.yaml")),
                *("--policies", self._options.policies or self._target.policies),
                *("--seeds", self._options.seeds or self._target.seeds),
                *("--out", str(self._records / "protocol"), *self._target.protocol),
                *("--hardware-note", f"{self._options.hardware_note}; {self._serve_text()}"),
                "--repeat-invalid",
            ]
        )

    def pack(self) -> None:
        """One archive of all records, with their checksums."""
        files = sorted(file for file in self._records.rglob("*") if file.is_file())
        manifest = self._records / "SHA256SUMS"
        lines = [
            f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(self._records)}\n"
            for file in files
            if file not in (manifest, self._log)
        ]
        manifest.write_text("".join(lines), encoding="utf-8")
        archive = self._out / "records.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(self._records, "records")
        print(f"packed {len(lines)} files: {archive}", flush=True)

    def stop_server(self) -> None:
        """End the server, if one runs."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()  # its guard ends it
            self._server.wait(60)
            self._server = None

    @property
    def _log(self) -> Path:
        return self._logs / f"{self.stage}.log"

    @property
    def _trials(self) -> Path:
        return self._records / "profile.trials.jsonl"

    def _vllm_python(self) -> str:
        found = shutil.which(self._vllm)
        if found is None:
            raise StageError(f"--vllm: got {self._vllm!r}; no such command was found")
        return str(Path(found).parent / "python")

    def _call(self, command: Sequence[str]) -> None:
        """Run a command; what it prints is kept."""
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        if code:
            raise StageError(f"exit status {code}; the end of {self._log}:\n{_tail(self._log)}")

    def _command(self) -> list[str]:
        arguments = json.loads((self._records / "serve.json").read_text(encoding="utf-8"))
        name = f"{self._target.shape}-random"
        return [
            *(self._vllm, "serve", str(self._model), "--load-format", "dummy"),
            *("--served-model-name", name, "--dtype", "bfloat16", *arguments),
            *("--disable-uvicorn-access-log", *self._target.serve),
            *shlex.split(self._options.serve_arguments),
        ]

    def _serve_text(self) -> str:
        return shlex.join(["vllm", *self._command()[1:]])

    def _serve(self) -> str:
        """The URL of the server, which is started where none runs."""
        if self._server is not None and self._server.poll() is None:
            return self._url
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        log = self._logs / "server.log"
        command = [*self._command(), "--host", "127.0.0.1", "--port", str(port)]
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        with log.open("ab") as output:
            self._server = subprocess.Popen(
                [sys.executable, str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | offline | dict(self._target.environment),
                start_new_session=True,
            )
        until_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < until_s:
            if self._server.poll() is not None:
                raise StageError(f"vllm serve ended; the end of {log}:\n{_tail(log)}")
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=2.0):
                    return self._url
            except (urllib.error.URLError, OSError):
                time.sleep(1.0)
        raise StageError(
            f"vllm serve was not ready within {READY_TIMEOUT_S:g} s; the end of {log}:\n"
            f"{_tail(log)}"
        )


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-LAST_LINES:])


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure all there is to measure on an H200.")
    parser.add_argument("--out", required=True, metavar="DIR", help="everything is kept there")
    parser.add_argument("--wheels", metavar="DIR", help="install from there, without a network")
    parser.add_argument("--vllm", metavar="COMMAND", help="an installed vLLM, in place of that")
    parser.add_argument(
        "--python",
        metavar="COMMAND",
        help="an interpreter that has vllm-tenant-tuning[live,report], in place of that",
    )
    parser.add_argument("--hardware-note", default="", metavar="TEXT", help="recorded")
    parser.add_argument("--policies", metavar="A,B,...", help="of the protocol")
    parser.add_argument("--seeds", metavar="A:B", help="of the protocol")
    parser.add_argument("--episode-s", type=float, metavar="S", help="of validation and protocol")
    parser.add_argument("--serve-arguments", default="", metavar="TEXT", help="of vllm serve")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="STAGE", help="may be repeated"
    )
    parser.add_argument(
        "--cpu-small", action="store_true", help="test all of it on a CPU, with a small model"
    )
    options = parser.parse_args()
    if options.wheels and not Path(options.wheels).is_dir():
        parser.error(f"--wheels: got {options.wheels!r}; accepted is a folder")
    runner = Runner(options, CPU_SMALL if options.cpu_small else H200)
    try:
        runner.run()
    except StageError as error:
        print(f"stage {runner.stage} failed: {error}", file=sys.stderr)
        print("the same command goes on with this stage", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted in stage {runner.stage}; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
