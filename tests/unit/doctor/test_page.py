from pathlib import Path

from kvtierd.doctor.page import page
from kvtierd.doctor.registry import built_in
from kvtierd.doctor.run import anchor

PAGE = Path(__file__).parents[3] / "docs" / "checks.md"


def test_the_page_of_checks_is_what_the_checks_say():
    assert PAGE.read_text() == page(built_in()), "make docs-checks writes it anew"


def test_every_reference_that_doctor_prints_is_a_heading():
    headings = {
        line.removeprefix("### ").replace(".", "")
        for line in PAGE.read_text().splitlines()
        if line.startswith("### ")
    }
    assert {anchor(check.id) for check in built_in()} <= headings
