"""Media sizes: read the size of an image, sound or clip from its header."""

from __future__ import annotations

from dilatant.data.media.clip import clip_size
from dilatant.data.media.image_file import image_size
from dilatant.data.media.sound_file import sound_size
from dilatant.data.sample import Media, MediaSize

_SIZE = {"image": image_size, "audio": sound_size, "video": clip_size}


def media_size(media: Media) -> MediaSize:
    """Return pixels, seconds or both, from the header or time stamps. Raises MediaError naming the file.

    Files that decoding would refuse because of their header are refused here, too.
    """
    return _SIZE[media.kind](media)
