"""Media kinds: detect image, audio or video by the first bytes or by the file name."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.data.media.image_file import IMAGE_SUFFIXES
from dilatant.data.sample import MediaKind

HEAD_BYTES = 64
"""Number of bytes that `kind_of_bytes` needs."""
_SUFFIXES: Mapping[MediaKind, frozenset[str]] = {
    "image": IMAGE_SUFFIXES | {"avif", "jfif", "jpe", "jp2", "j2k", "heic", "heif", "jxl", "pbm", "apng", "ico"},
    "audio": frozenset({"wav", "flac", "mp3", "ogg", "oga", "opus", "aif", "aiff", "aifc", "au", "m4a", "aac"})
    | {"wma", "amr", "caf", "weba", "mp2", "mka"},
    "video": frozenset({"mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "mpeg", "wmv", "flv", "ts", "m2ts"})
    | {"3gp", "ogv"},
}
"""Includes formats that cannot be decoded: such a file is reported as a damaged media item, not ignored."""
STILL_SUFFIXES = IMAGE_SUFFIXES - {"gif"}
"""Suffixes of still pictures, a list of which stands for a clip."""
_SIGNATURES: tuple[tuple[int, bytes, MediaKind], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image"),
    (0, b"\xff\xd8\xff", "image"),
    (0, b"GIF8", "image"),
    (0, b"BM", "image"),
    (0, b"II*\0", "image"),
    (0, b"MM\0*", "image"),
    (0, b"\0\0\0\x0cjP  ", "image"),
    (0, b"\xff\x4f\xff\x51", "image"),
    (8, b"WEBP", "image"),
    (8, b"WAVE", "audio"),
    (8, b"AIFF", "audio"),
    (8, b"AVI ", "video"),
    (0, b"fLaC", "audio"),
    (0, b"OggS", "audio"),
    (0, b"ID3", "audio"),
    (0, b"\xff\xfb", "audio"),
    (0, b"\xff\xf3", "audio"),
    (0, b"\x1aE\xdf\xa3", "video"),
    (0, b"\0\0\x01\xba", "video"),
)
_BRANDS: Mapping[bytes, MediaKind] = {
    **dict.fromkeys((b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1"), "image"),
    **dict.fromkeys((b"M4A ", b"M4B "), "audio"),
}
"""Brands of the ISO container of MP4; all others are videos."""


def kind_of_suffix(suffix: str) -> MediaKind | None:
    """Return the kind by a file suffix, in lower case and without a dot."""
    return next((kind for kind, suffixes in _SUFFIXES.items() if suffix in suffixes), None)


def kind_of_name(name: str) -> MediaKind | None:
    """Return the kind by the suffix of a path."""
    return kind_of_suffix(name.rpartition(".")[2].lower())


def kind_of_bytes(head: bytes) -> MediaKind | None:
    """Return the kind by a file's first bytes; None for unknown content."""
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "video")
    return next((kind for at, mark, kind in _SIGNATURES if head[at : at + len(mark)] == mark), None)
