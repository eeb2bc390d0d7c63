"""Texts on which two tokenizers are likely to differ."""

EDGE_CASE_TEXTS = [
    "",
    " ",
    "   ",
    "\t\n",
    "\u00a0",  # no-break space
    "\u200b\u2003\u3000",  # spaces of no width, of an em, of an ideograph
    "\x00\x07\x1b[0m",  # controls
    "\ufeffbyte order mark",
    "\ufffd\ufdd0",  # the replacement character, and one that is none
    "a\u0301e\u0308 \u00e1\u00eb \u1e9e\u0130\ufb01\u2460",  # marks alone and composed, compatibility forms
    "\u4f60\u597d \u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea\u2764\ufe0f",  # emoji
    "two  blanks   and\nlines\r\n and a tab\there ",
    " leading",
    "trailing ",
    "UPPER lower MiXeD",
    "don't , it 's , we 've ; isn't it ? yes ! ' quoted ' .",
    "http://a.b/c?d=e&f#g 1,234.56 \u20ac%",
    "_" * 40,
    "<",
    "</s",
    "<</s>>",
    "[CLS",
    ">>deu<< text",
    ">>",
    ">>unfinished",
    "\u2581meta \u2581",  # SentencePiece's own mark of a blank
    "\u0120byte \u010a",  # byte-level BPE's
    "word " * 200,
    "x" * 400,
    "\u00e9" * 150,
]
