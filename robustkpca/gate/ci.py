"""A verdict of `regression.check` as CI systems read it: a Markdown summary, GitHub annotations, JUnit XML."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

import pandas as pd

from robustkpca import escape
from robustkpca.gate.check import COLUMNS, HOLDS, Verdict
from robustkpca.page import markdown


def summary(verdict: Verdict) -> str:
    """Markdown for a pull request: the verdict, its reasons, and every cell, the bad ones first."""
    lines = [f"### robustkpca: {verdict.text}", ""]
    lines += [f"- {escape.markdown(line)}" for line in verdict.lines]
    lines += [f"- note: {escape.markdown(note)}" for note in verdict.notes]
    if len(verdict.cells):
        order = verdict.cells["verdict"].map({"regressed": 0, "suspicious": 1, "holds": 2})
        rows = verdict.cells.assign(_order=order).sort_values("_order", kind="stable")
        cells = pd.DataFrame(
            {
                "attack": (rows["attack"] + " " + rows["budget"]).str.strip(),
                "baseline %": rows["baseline"].map("{:.1f}".format),
                "now %": rows["now"].map("{:.1f}".format),
                "change (95 % interval)": [
                    f"{r.change:+.1f} ({r.low:+.1f} to {r.high:+.1f})" for r in rows.itertuples()
                ],
                "may lose": rows["tolerance"].map("{:g}".format),
                "verdict": rows["verdict"],
            }
        ).set_index(pd.Index(rows["model"], name="model"))
        lines += ["", markdown(cells)]
    return "\n".join(lines) + "\n"


def github_annotations(verdict: Verdict) -> list[str]:
    """GitHub workflow commands, one a line."""
    title = f"robustkpca: {verdict.text}"
    lines = [f"::error title={escape.github_property(title)}::{escape.github(line)}" for line in verdict.lines]
    return lines + [f"::notice title=robustkpca::{escape.github(note)}" for note in verdict.notes]


def junit(verdict: Verdict) -> str:
    """JUnit XML: one test case for each cell, and one, `verdict`, for the run as a whole."""
    suite = Xml.Element("testsuite", name="robustkpca check")
    failures = 0
    for row in verdict.cells[COLUMNS].itertuples():
        case = Xml.SubElement(
            suite, "testcase", classname=escape.xml(row.model), name=escape.xml(f"{row.attack} {row.budget}".strip())
        )
        if row.verdict != "holds":
            failures += 1
            Xml.SubElement(
                case, "failure", type=row.verdict, message=f"{row.baseline:.1f} to {row.now:.1f} %, p = {row.p:.2g}"
            )
    whole = Xml.SubElement(suite, "testcase", classname="robustkpca", name="verdict")
    if verdict.code != HOLDS:
        text = escape.xml("\n".join(verdict.lines))
        Xml.SubElement(whole, "failure", type=verdict.text, message=escape.xml(verdict.lines[0])).text = text
        failures += 1
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(failures))
    Xml.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(suite, encoding="unicode") + "\n"
