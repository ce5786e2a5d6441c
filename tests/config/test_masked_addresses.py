"""Secrets in addresses are masked wherever text is shown, and nothing else is."""

from __future__ import annotations

import io
import pickle

import pytest
from rich.console import Console

from dilatant.config import UserError
from dilatant.config.printable import masked
from dilatant.report.pages.page import render
from dilatant.report.say import Terminal, plain_table, print_table, say

SECRETS = ("s3cret", "AKIA")
HOSTILE = [
    "https://AKIA:s3cret@host.org/a.jsonl",
    "https://s3cret@host.org/a.jsonl",
    "ftp://AKIA:s3/cret@s3cret@host/a",
    "https://AKIA:s3?cret#s3cret@host/a",
    "https:/AKIA:s3cret@host/a",
    "s3://AKIA:it's\"s3cret@bucket/key",
    "https://host/a?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=s3cret",
    "https://host/a?sv=1&sig=s3cret%3D&se=2",
    "https://host/a?ACCESS_TOKEN=s3cret#part",
    "https://host/a?x=1&amp;api-key=s3cret",
    "'https://host/a?token=s3cret' does not exist; see b",
    '{"a":"https://AKIA:s3cret@host","b":1}',
    "--coordinator 'AKIA:s3cret@host:1234' is no HOST:PORT",
    "a.parquet?token=s3cret",
]
HARMLESS = [
    "https://host.org:8080/images@2x/a.png?width=3&page=a@b.c",
    "https://[::1]:80/a@b",
    "hf://datasets/owner/name@main/a.parquet",
    "s3://bucket/key=1/token=2",
    "mail somebody@example.org: it's a?b = c",
    "10:30:15 to rank3@node7",
    '"http://host/","mail":"a@b"',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_secrets_in_addresses_are_masked(text):
    shown = masked(text)
    assert not any(secret in shown for secret in (*SECRETS, "s3", "cret") if "s3:" not in shown), shown
    assert "***" in shown
    assert masked(shown) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_is_shown_as_it_is(text):
    assert masked(text) == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["x:" * 400_000 + "@", "://a:" * 200_000 + " @", ("?" + "a" * 50) * 20_000 + "=@"])
def test_hostile_texts_take_no_minutes(text):
    """Patterns without limits of length take the square of it, over ten minutes here."""
    assert masked(text) == text


def test_the_rest_of_a_message_stays():
    text = "'https://AKIA:s3cret@host/a?token=s3cret&v=2' does not exist; see b@c"
    assert masked(text) == "'https://***@host/a?token=***&v=2' does not exist; see b@c"


def test_errors_and_consoles_mask_even_broken_lines():
    address = HOSTILE[0]
    error = pickle.loads(pickle.dumps(UserError(f"{address!r} is gone")))
    assert str(error) == repr(error.args[0])[1:-1] == "'https://***@host.org/a.jsonl' is gone"
    assert isinstance(Terminal(), Console)
    console = Terminal(file=io.StringIO(), width=16)
    table = plain_table(["place"])
    table.add_row(address)
    print_table(console, table)
    say(console, address)
    console.print(address)
    printed = "".join(console.file.getvalue().split())
    assert printed.count("https://***@host.org/a.jsonl") == 3


def test_pages_mask_what_they_are_given():
    page = render("a tab", HOSTILE[0], HOSTILE[6], [], "the end")
    assert "https://***@host.org/a.jsonl" in page
    assert "X-Amz-Signature=***" in page
    assert not any(secret in page for secret in SECRETS)
