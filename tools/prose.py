"""Checks what people read: documentation, docstrings, comments and messages.

    python tools/prose.py            every file that git tracks
    python tools/prose.py FILE...    these files

Each rule names words that hide the subject or replace a term of the field, and what to write
instead. The style is that of the Kubernetes API documentation and the Google developer
documentation style guide: present tense, active voice, one idea a sentence. Exits with 1 if it
finds anything.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("connector", "operator", "docs", "charts", "crds", "examples", "images", "benchmarks",
           "tools", "tests", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md",
           "Makefile")  # fmt: skip
KINDS = {".py", ".md", ".yaml", ".yml", ".tpl", ".txt", ".json", ""}
NOT_OURS = ("tests/cluster/kubernetes/source/", "tools/prose.py", "constraints.txt")

RULES = {
    r"is not accepted[;:]|accepted (?:is|are)\b": "field: Invalid value: ...: must be ...",
    r"\b(?:nobody|no one)\b": "name the component: no engine, no pod, no process",
    r"\b(?:somebody|someone|everybody|everyone)\b": "name who: a pod, the user, every process",
    r"\bwhoever\b": "name who: the process that ...",
    r"\bfor ever\b": "indefinitely, or the bound",
    r"\bbegun\b": "started",
    r"\bany more\b": "no longer",
    r"\banew\b": "again",
    r"\bthereby\b|\bthereof\b|\bwherefore\b": "by this, or a new sentence",
    r"\bdoomed\b": "cancelled",
    r"\blet(?:s|ting)? go of\b": "release",
    r"\boffice\b|\bdeposed\b": "leader, term, lost leadership",
    r"\bas it should be\b": "say what is expected",
    r"\bis (?:owed|due) (?:to|an) answer\b": "is expected",
    r"\bof the dead\b|\bthe dead\b": "of processes that have exited",
    r"\bnone of its business\b|\bcome what may\b": "state the condition",
    r"\bDATAPATH\b|\bCLUSTER \d|\bHOUSE \d": "a page in docs/, or the reason itself",
}


def files(arguments: list[str]) -> list[Path]:
    """The files to check."""
    if arguments:
        return [Path(each).resolve() for each in arguments]
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        ROOT / name
        for name in listed.stdout.splitlines()
        if Path(name).suffix in KINDS and not name.startswith(NOT_OURS)
    ]


def findings(path: Path) -> list[str]:
    """One line for each rule that a line of the file breaks."""
    compiled = [(re.compile(pattern, 0 if "DATAPATH" in pattern else re.IGNORECASE), advice)
                for pattern, advice in RULES.items()]  # fmt: skip
    found = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    for number, line in enumerate(lines, 1):
        for rule, advice in compiled:
            if match := rule.search(line):
                name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
                found.append(f"{name}:{number}: {match.group(0)!r}: {advice}")
    return found


def main() -> int:
    """The command."""
    found = [line for path in files(sys.argv[1:]) if path.is_file() for line in findings(path)]
    for line in found:
        print(line)
    if found:
        print(f"{len(found)} places to rewrite", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
