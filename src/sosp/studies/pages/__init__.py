"""The results page: every number from a record or from the paper's data; generated, and checked against them."""

from sosp.studies.pages.publish import check, pages, write, write_one

__all__ = ["write", "write_one", "check", "pages"]
