"""Reads a page as a browser does: its text, links and pictures."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Its text and whether its elements are closed in order."""

    VOID = ("meta", "br", "input", "line", "polyline")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.words, self.attributes = [], [], []
        self.feed(text)
        assert self.open in (["html"], []), self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
