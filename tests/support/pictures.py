"""Encoded photographs, made by the encoders of Pillow and pillow-heif."""

import io

from PIL import Image

#: The colour of the corner that is stored top left.
CORNER = (250, 10, 10)


def encoded(kind: str, orientation: int = 1) -> bytes:
    """A gray photograph of 64 x 48 stored pixels with a red corner, in this format of Pillow."""
    if kind == "HEIF":
        from pillow_heif import register_heif_opener

        register_heif_opener()
    image = Image.new("RGB", (64, 48), (120, 120, 120))
    image.paste(CORNER, (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    image.save(stream, kind, exif=exif.tobytes(), quality=95)
    return stream.getvalue()
