"""How large a media item is, by its header."""

from __future__ import annotations

from dilatant.data.media.clip import clip_size
from dilatant.data.media.image_file import image_size
from dilatant.data.media.sound_file import sound_size
from dilatant.data.sample import Media, MediaSize

_SIZE = {"image": image_size, "audio": sound_size, "video": clip_size}


def media_size(media: Media) -> MediaSize:
    """Pixels, seconds or both, from the header alone. Raises MediaError naming the file.

    What decoding would refuse for its header's sake is refused here.
    """
    return _SIZE[media.kind](media)
