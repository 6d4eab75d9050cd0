"""What a case says of its failure, without the folders of the machine that it ran on."""

import re


def plain(text):
    return re.sub(r"(?<![\w.])(?:\.\./)*/?(?:[\w.+-]+/){2,}(?=[\w.+-])", "", text)
