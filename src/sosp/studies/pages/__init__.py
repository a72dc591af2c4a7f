"""The results page: every number from a record or from the paper's data; generated, and checked against them."""

from sosp.studies.pages.page_files import check_pages, make_pages, write_page, write_pages

__all__ = ["write_pages", "write_page", "check_pages", "make_pages"]
