"""Try what people get wrong, what happens to disks and what strangers send, and say which answers are not good.

    python tests/mistakes.py              # what `make mistakes` does; writes docs/mistakes.json
    python tests/mistakes.py caches npz   # the cases with one of these words in their names

A good answer has the right exit code and one line that says what is wrong; it has no traceback, does not hang, runs
nothing that it read, and leaves every file as it was, but for those that a case allows. tests/mistake_cases.py is the
table of cases.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before torch reads it
ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import forked  # noqa: E402
import records  # noqa: E402
from workshop import ENVIRONMENT, STEPS, Workshop, contents_of, write  # noqa: E402

MARKER = "MARKER"  # the file that planted code makes
ALWAYS_LEFT = ("home", "home/*")  # of libraries, which keep things there
Change = Callable[[Path], object] | bytes | str | None


@dataclass(frozen=True)
class Case:
    """A command, the folder that it is started in, and what must come of it."""

    family: str
    command: str
    words: tuple[str, ...]  # patterns: in the line of the error, or in all that was printed; with `!` nowhere
    code: int | tuple[int, ...] = 2
    given: dict[str, Change] = field(default_factory=dict)  # what is done to files before
    needs: tuple[str, ...] = ()  # what else is to be there, of the workshop
    leaves: tuple[str, ...] = ()  # patterns of what may be new, changed or gone
    before: tuple[str, ...] = ()  # commands that are run first, whatever comes of them
    environment: dict[str, str] = field(default_factory=dict)
    stdout: str = ""
    check: Callable[[Path], str | None] | None = None  # what else is wrong with what is left
    skip: str = ""  # why it cannot be tried here
    timeout: float = 60

    @property
    def name(self) -> str:
        return f"{self.family}: {self.command}" + "".join(f" ({path})" for path in self.given)


def words_of(command: str, workshop: Workshop) -> list[str]:
    """The command with what stands for {tiny}, the flags of a tiny run, {small}, without its data, and so on."""
    tiny = workshop.flags()
    flags = {"{tiny}": tiny, "{small}": tiny[1:], "{steps}": STEPS, "{cache}": [f"--cache_dir={workshop.cache}"]}
    flags["{digits}"] = [str(ROOT / "configs" / "digits.yaml")]
    return [word for part in shlex.split(command) for word in flags.get(part, [part])]


def prepare(case: Case, workshop: Workshop, folder: Path, held: ExitStack) -> None:
    """Put what the case names into its folder, and do to it what the case wants."""
    (folder / "home").mkdir(parents=True)
    named = {
        part.removeprefix("./").split("/")[0]
        for text in (case.command, *case.before)
        for part in re.split(r"[ =]", text)
    }
    named |= {*case.needs, *(path.split("/")[0] for path in case.given)}
    for thing in named.intersection(workshop.things):
        workshop.copy(thing, folder)
    for pattern, change in case.given.items():
        paths = sorted(folder.glob(pattern)) if "*" in pattern else [folder / pattern]
        assert paths, f"{case.name}: nothing is called {pattern}"
        for path in paths:
            if change is None:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            elif callable(change):
                if hasattr(result := change(path), "__exit__"):
                    held.enter_context(result)
            else:
                write(path, change.encode() if isinstance(change, str) else change)


def shortfalls(case: Case, workshop: Workshop, folder: Path) -> list[str]:
    """Try a case; return what is not good about the answer."""
    environment = {**ENVIRONMENT, "HOME": str(folder / "home"), **case.environment}
    with ExitStack() as held:
        prepare(case, workshop, folder, held)
        for command in case.before:
            forked.run(words_of(command, workshop), folder, environment)
        before = contents_of(folder)
        ended = forked.run(words_of(case.command, workshop), folder, environment, case.stdout, case.timeout)
    return judge(case, ended, before, contents_of(folder)) + [
        found for found in [case.check and case.check(folder)] if found
    ]


def judge(case: Case, ended: forked.Ended, before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Compare what came of a case with what should."""
    printed, found = ended.stdout + ended.stderr, []
    codes = case.code if isinstance(case.code, tuple) else (case.code,)
    errors = re.findall(r"^\w+\.py: (?:error: )?.*$", ended.stderr, re.MULTILINE)
    if MARKER in after:
        found.append("planted code was executed")
    if ended.code is None:
        found.append(f"hangs: no end after {case.timeout:g} s")
    elif ended.code not in codes:
        found.append(f"exit code {ended.code} instead of {' or '.join(map(str, codes))}")
    if "Traceback" in printed or "Exception ignored" in printed:
        found.append(f"a traceback: {printed.strip().splitlines()[-1][:300]}")
    elif (ended.code == 2 or (ended.code == 1 and case.code != 1)) and len(errors) != 1:
        found.append(f"{len(errors)} lines of an error instead of 1")
    said = errors[-1] if ended.code and errors else printed
    for word in case.words:
        if word.startswith("!"):
            if re.search(word[1:], printed, re.IGNORECASE):
                found.append(f"{word[1:]!r} is said")
        elif not re.search(word, said, re.IGNORECASE):
            found.append(f"{word!r} is not said: {' '.join(said.split())[-300:]!r}")
    changed = [path for path in sorted(before.keys() | after.keys()) if before.get(path, 0) != after.get(path, 0)]
    changed = [path for path in changed if not any(fnmatch(path, allowed) for allowed in (*ALWAYS_LEFT, *case.leaves))]
    for kind, is_kind in (("left behind", lambda path: path not in before), ("lost", lambda path: path not in after)):
        if paths := [path for path in changed if is_kind(path)]:
            found.append(f"{kind}: {', '.join(paths[:4])}" + (f" and {len(paths) - 4} more" if len(paths) > 4 else ""))
    if paths := [path for path in changed if path in before and path in after]:
        found.append(f"changed: {', '.join(paths[:4])}")
    return found


def try_all(cases: list[Case], workshop: Workshop, folder: Path, jobs: int) -> list[tuple[Case, list[str], float]]:
    """Try the cases in so many processes, which take one after the other."""
    reader, writer = os.pipe()
    for number in range(len(cases)):
        os.write(writer, number.to_bytes(4, "big"))
    os.close(writer)
    workers = []
    for worker in range(jobs):
        if (pid := os.fork()) == 0:
            try:
                while taken := os.read(reader, 4):
                    number = int.from_bytes(taken, "big")
                    place, begin = folder / f"case {number}", time.monotonic()
                    try:
                        found = shortfalls(cases[number], workshop, place)
                    except Exception as error:  # of the table, not of what it tries
                        found = [f"the case cannot be tried: {type(error).__name__}: {error}"]
                    result = json.dumps([number, found, time.monotonic() - begin])
                    with (folder / f"results {worker}").open("a") as file:
                        file.write(f"{result}\n")
                    shutil.rmtree(place, ignore_errors=True)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        workers.append(pid)
    os.close(reader)
    for pid in workers:
        os.waitpid(pid, 0)
    lines = [line for path in folder.glob("results *") for line in path.read_text().splitlines()]
    results = {number: (found, seconds) for number, found, seconds in map(json.loads, lines)}
    return [(case, *results.get(number, (["was not tried"], 0.0))) for number, case in enumerate(cases)]


def report(results: Iterable[tuple[Case, list[str], float]]) -> None:
    for case, found, _ in results:
        if found:
            print(case.name)
            print("".join(f"    {line}\n" for line in found), end="")


def main() -> None:
    from mistake_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="try only the cases with one of these words in their names")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cases at a time")
    arguments = parser.parse_args()
    wanted = [case for case in CASES if not arguments.words or any(word in case.name for word in arguments.words)]
    skipped, cases = [case for case in wanted if case.skip], [case for case in wanted if not case.skip]
    begin = time.monotonic()
    forked.import_everything()
    with tempfile.TemporaryDirectory() as name:
        workshop = Workshop(Path(name) / "workshop")
        workshop.make()
        results = try_all(cases, workshop, Path(name), arguments.jobs)
    report(results)
    bad = [(case, found) for case, found, _ in results if found]
    families = collections.Counter(case.family for case in cases)
    short = collections.Counter(case.family for case, _ in bad)
    record = {
        "cases": len(cases),
        "fall_short": len(bad),
        "skipped": {case.name: case.skip for case in skipped},
        "seconds": round(time.monotonic() - begin),
        "jobs": arguments.jobs,
        "families": {name: {"cases": count, "fall_short": short[name]} for name, count in families.items()},
        "shortfalls": {case.name: found for case, found in bad},
    }
    if not arguments.words:
        records.write("mistakes", record)
    print(f"{len(cases)} cases in {record['seconds']} s, {len(bad)} fall short, {len(skipped)} could not be tried here")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
