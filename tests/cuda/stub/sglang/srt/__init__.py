"""Names as SGLang has them."""
