"""Endless English-German phrases of dates, times, numbers, money, units and names.

Every word comes from the Unicode CLDR tables that Babel carries, except a few connectives
("at"/"um", "until"/"bis zum") in the templates of `content`. These use only constructions that
need no agreement between their parts, so that a source has exactly one right target. Babel is
needed to generate phrases; the files in `data/` are generated already.

What the phrases are made of: the CLDR codes they use and the templates they fill.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import click
from babel import Locale
from babel.dates import format_date, format_skeleton, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import (
    format_compact_decimal,
    format_currency,
    format_decimal,
    format_percent,
)
from babel.units import format_unit

RelativeUnit = Literal["second", "minute", "hour", "day", "week", "month", "year"]


def _codes(text: str) -> tuple[str, ...]:
    """Codes written one after another, which reads better than a hundred quoted strings."""
    return tuple(text.split())


# Countries whose German name has no article, so that "in X" is right in both languages.
COUNTRIES = _codes(
    "AD AF AL AM AO AR AT AU AZ BB BD BE BG BI BJ BO BR BT BW BY CA CL CM CN CO CR CU CY CZ DE DJ"
    " DK DZ EC EE EG ER ES ET FI FJ FR GA GE GH GM GN GR GT GY HN HR HT HU ID IE IL IN IS IT JM JO JP"
    " KE KG KH KP KR KW KZ LA LB LI LK LR LS LT LU LV LY MA MC MD ME MG ML MM MR MT MU MW MX MY MZ"
    " NA NG NI NO NP NR NZ OM PA PE PG PK PL PT PY QA RO RS RU RW SA SE SG SI SL SM SN SO SR SV SY"
    " SZ TG TH TJ TL TM TN TO TV TW TZ UG UY UZ VE VN VU WS ZA ZM ZW"
)
NO_TERRITORY = _codes("EU EZ QO UN XA XB ZZ")
CURRENCIES = _codes(
    "AED ARS AUD BGN BRL CAD CHF CLP CNY COP CZK DKK DZD EGP EUR GBP GEL HKD HUF IDR ILS INR ISK"
    " JPY KES KRW KZT MAD MXN MYR NGN NOK NZD PEN PHP PKR PLN QAR RON RSD SAR SEK SGD THB TND TRY"
    " TWD UAH USD UYU VND ZAR"
)
UNITS = _codes(
    "angle-degree area-acre area-hectare area-square-centimeter area-square-foot"
    " area-square-kilometer area-square-meter area-square-mile"
    " consumption-liter-per-100-kilometer digital-bit digital-byte digital-gigabyte"
    " digital-kilobyte digital-megabit digital-megabyte digital-terabyte duration-century"
    " duration-day duration-decade duration-hour duration-microsecond duration-millisecond"
    " duration-minute duration-month duration-second duration-week duration-year"
    " electric-ampere electric-milliampere electric-ohm electric-volt energy-calorie energy-joule"
    " energy-kilocalorie energy-kilojoule energy-kilowatt-hour force-newton frequency-gigahertz"
    " frequency-hertz frequency-kilohertz frequency-megahertz graphics-megapixel graphics-pixel"
    " length-centimeter length-decimeter length-foot length-inch length-kilometer"
    " length-light-year length-meter length-micrometer length-mile length-millimeter"
    " length-nanometer length-nautical-mile length-yard light-lux mass-carat mass-gram"
    " mass-kilogram mass-microgram mass-milligram mass-ounce mass-pound mass-tonne"
    " power-gigawatt power-horsepower power-kilowatt power-megawatt power-watt"
    " pressure-atmosphere pressure-bar pressure-hectopascal pressure-millibar"
    " speed-kilometer-per-hour speed-knot speed-meter-per-second speed-mile-per-hour"
    " temperature-celsius temperature-fahrenheit temperature-kelvin torque-newton-meter"
    " volume-barrel volume-centiliter volume-cubic-centimeter volume-cubic-kilometer"
    " volume-cubic-meter volume-deciliter volume-gallon volume-hectoliter volume-liter"
    " volume-milliliter volume-pint volume-tablespoon volume-teaspoon"
)
SECONDS: dict[RelativeUnit, int] = {
    "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800,
    "month": 2592000, "year": 31536000,
}  # fmt: skip
"""Length in seconds that Babel gives each unit of relative time."""

# Weight, English, German. A digit behind a slot's name only distinguishes two slots of a kind.
TEMPLATES: tuple[tuple[int, str, str], ...] = (
    (6, "{full_date} at {time}", "{full_date} um {time}"),
    (4, "{full_date} at {time} in {country}", "{full_date} um {time} in {country}"),
    (3, "{full_date}", "{full_date}"),
    (3, "{short_date}, {time1} to {time2}", "{short_date}, {time1} bis {time2}"),
    (3, "from {time1} to {time2}", "von {time1} bis {time2}"),
    (3, "on {long_date}", "am {long_date}"),
    (2, "since {long_date}", "seit dem {long_date}"),
    (2, "until {long_date}", "bis zum {long_date}"),
    (2, "before {long_date} in {country}", "vor dem {long_date} in {country}"),
    (2, "after {long_date}", "nach dem {long_date}"),
    (2, "{month_year} to {month_year2}", "{month_year} bis {month_year2}"),
    (2, "{quarter} in {country}", "{quarter} in {country}"),
    (4, "{relative}: {quantity}", "{relative}: {quantity}"),
    (3, "{relative} in {country}", "{relative} in {country}"),
    (3, "{days} at {time}", "{days} um {time}"),
    (2, "{months} in {country}", "{months} in {country}"),
    (6, "{territories}", "{territories}"),
    (5, "{languages}", "{languages}"),
    (4, "{languages} in {country}", "{languages} in {country}"),
    (3, "{territories}: {percent}", "{territories}: {percent}"),
    (5, "{quantity}", "{quantity}"),
    (4, "{quantity1} or {quantity2}", "{quantity1} oder {quantity2}"),
    (4, "{quantities} in {country}", "{quantities} in {country}"),
    (5, "{money} for {quantity}", "{money} für {quantity}"),
    (3, "{money} on {long_date}", "{money} am {long_date}"),
    (3, "{money1} or {money2}", "{money1} oder {money2}"),
    (3, "{number} ({percent})", "{number} ({percent})"),
    (2, "{number1} and {number2}", "{number1} und {number2}"),
    (2, "{percent} of {number}", "{percent} von {number}"),
    (2, "{country}: {number}", "{country}: {number}"),
)


Split = Literal["train", "validation", "test"]
Pair = tuple[str, str]
"""The same content in English and in German."""

LOCALES = (Locale("en"), Locale("de"))
HELD_OUT_PERCENT = 4
"""Share of all phrases, in percent, kept for each of validation and test."""
FAR = 10**9
"""A threshold that keeps Babel's relative times in the unit asked for."""


def _names(tables: Iterable[Mapping[str, str]], codes: Iterable[str]) -> list[Pair]:
    """The (English, German) names of the codes, without those that need a typographic apostrophe.

    Such an apostrophe is left out because MarianTokenizer rewrites it where sacremoses is
    installed and keeps it elsewhere; an English name of two codes is left out as ambiguous.
    """
    english, german = tables
    pairs = [(english[c], german[c]) for c in codes if c in english and c in german]
    uses = Counter(pair[0] for pair in pairs)
    return [pair for pair in pairs if uses[pair[0]] == 1 and not set("’–()") & set("".join(pair))]


@lru_cache(maxsize=1)
def _tables() -> dict[str, list[Pair]]:
    """The name tables, each a list of (English, German), read from CLDR once."""
    english, _ = LOCALES
    territory_maps = [locale.territories for locale in LOCALES]
    codes = sorted(c for c in map(str, english.territories) if c.isalpha() and c not in NO_TERRITORY)
    territories = _names(territory_maps, codes)
    homonyms = {pair[0] for pair in territories}
    languages = _names(
        [locale.languages for locale in LOCALES],
        sorted(c for c in map(str, english.languages) if len(c) == 2),
    )
    wide = [locale.days["format"]["wide"] for locale in LOCALES]
    months = [locale.months["format"]["wide"] for locale in LOCALES]
    return {
        "territories": territories,
        "country": _names(territory_maps, COUNTRIES),
        "languages": [pair for pair in languages if pair[0] not in homonyms],
        "days": [(wide[0][i], wide[1][i]) for i in range(7)],
        "months": [(months[0][i], months[1][i]) for i in range(1, 13)],
    }


def _both(form: Callable[[Locale], str]) -> Pair:
    """A content formatted for both locales, with every kind of space made a plain one."""
    english, german = (" ".join(form(locale).split()) for locale in LOCALES)
    return english, german


def _day(rng: random.Random) -> date:
    """A day of the years 1950 to 2049."""
    return date.fromordinal(date(1950, 1, 1).toordinal() + rng.randrange(36525))


@lru_cache(maxsize=100_000)
def _date(day: date, style: Literal["full", "long", "medium", "short"]) -> Pair:
    return _both(lambda locale: format_date(day, style, locale=locale))


@lru_cache(maxsize=2_000)
def _time(minutes: int) -> Pair:
    """A time of day, given in minutes after midnight."""
    moment = time(minutes // 60, minutes % 60)
    return _both(lambda locale: format_time(moment, "short", locale=locale))


@lru_cache(maxsize=10_000)
def _skeleton(skeleton: str, day: date) -> Pair:
    return _both(lambda locale: format_skeleton(skeleton, day, locale=locale))


@lru_cache(maxsize=10_000)
def _relative(unit: RelativeUnit, count: int) -> Pair:
    """A time seen from now: "in 3 days" for a positive count, "3 days ago" for a negative one."""
    delta = timedelta(seconds=count * SECONDS[unit])
    return _both(
        lambda locale: format_timedelta(delta, unit, threshold=FAR, add_direction=True, locale=locale)
    )


def _amount(rng: random.Random) -> Decimal:
    """A number as people write them: mostly small, some with a decimal, a few in thousands."""
    draw = rng.random()
    if draw < 0.5:
        return Decimal(rng.randint(1, 99))
    if draw < 0.65:
        return Decimal(rng.randint(100, 29_999))
    # Never a whole number: "1.0" and "1" differ in their plural form.
    return Decimal(rng.randrange(1_000) * 10 + rng.randint(1, 9)).scaleb(-1)


def _number(rng: random.Random) -> Pair:
    if rng.random() < 0.3:
        value = rng.randint(11, 9_999) * 10 ** rng.choice((5, 8))
        return _both(
            lambda locale: format_compact_decimal(value, format_type="long", fraction_digits=1, locale=locale)
        )
    amount = _amount(rng) if rng.random() < 0.6 else Decimal(rng.randrange(10_000_000))
    return _both(lambda locale: format_decimal(amount, locale=locale))


def _percent(rng: random.Random) -> Pair:
    share = Decimal(rng.randint(1, 999)).scaleb(-3)
    return _both(lambda locale: format_percent(share, decimal_quantization=False, locale=locale))


def _quantity(rng: random.Random) -> Pair:
    amount, unit = _amount(rng), rng.choice(UNITS)
    return _both(lambda locale: format_unit(amount, unit, "long", locale=locale))


def _money(rng: random.Random) -> Pair:
    amount, currency = _amount(rng) + 1, rng.choice(CURRENCIES)
    style: Literal["standard", "name"] = "standard" if rng.random() < 0.4 else "name"
    return _both(lambda locale: format_currency(amount, currency, format_type=style, locale=locale))


def _several(rng: random.Random, pairs: list[Pair], least: int = 1, most: int = 3) -> Pair:
    """A list of some of the pairs, joined by commas and "and" or "or" as each language does."""
    chosen = rng.sample(pairs, rng.randint(least, most))
    style: Literal["standard", "or"] = "or" if rng.random() < 0.3 else "standard"
    english, german = (format_list([pair[i] for pair in chosen], style, locale=LOCALES[i]) for i in range(2))
    return english, german


def _name_list(table: str, most: int) -> Callable[[random.Random], Pair]:
    return lambda rng: _several(rng, _tables()[table], most=most)


_SLOTS: dict[str, Callable[[random.Random], Pair]] = {
    "full_date": lambda rng: _date(_day(rng), "full"),
    "long_date": lambda rng: _date(_day(rng), "long"),
    "short_date": lambda rng: _date(_day(rng), "medium"),
    "time": lambda rng: _time(rng.randrange(0, 1440, rng.choice((1, 5, 15)))),
    "month_year": lambda rng: _skeleton("yMMMM", _day(rng).replace(day=1)),
    "quarter": lambda rng: _skeleton("yQQQQ", _day(rng).replace(day=1)),
    "relative": lambda rng: _relative(rng.choice(list(SECONDS)), rng.choice((-1, 1)) * rng.randint(1, 99)),
    "country": lambda rng: rng.choice(_tables()["country"]),
    "territories": _name_list("territories", 4),
    "languages": _name_list("languages", 3),
    "days": _name_list("days", 3),
    "months": _name_list("months", 3),
    "number": _number,
    "percent": _percent,
    "quantity": _quantity,
    "quantities": lambda rng: _several(rng, [_quantity(rng) for _ in range(3)], least=2),
    "money": _money,
}
"""What makes a random content for each kind of slot in a template."""


@lru_cache(maxsize=1)
def _compiled() -> tuple[list[int], list[tuple[str, str, list[str]]]]:
    """The templates' weights, and each template's two texts with the names of its slots."""
    parse = string.Formatter().parse
    slots = [[name for _, name, _, _ in parse(english) if name] for _, english, _ in TEMPLATES]
    texts = [(english, german, s) for (_, english, german), s in zip(TEMPLATES, slots, strict=True)]
    return [weight for weight, _, _ in TEMPLATES], texts


def _clause(rng: random.Random) -> Pair:
    weights, texts = _compiled()
    english, german, slots = rng.choices(texts, weights)[0]
    filled = {slot: _SLOTS[slot.rstrip(string.digits)](rng) for slot in slots}
    return (
        english.format(**{slot: pair[0] for slot, pair in filled.items()}),
        german.format(**{slot: pair[1] for slot, pair in filled.items()}),
    )


def split_of(source: str) -> Split:
    """The split that an English phrase belongs to, by its hash: the same on every machine."""
    bucket = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") % 100
    if bucket < HELD_OUT_PERCENT:
        return "test"
    return "validation" if bucket < 2 * HELD_OUT_PERCENT else "train"


def phrases(split: Split, seed: int) -> Iterator[dict[str, str]]:
    """Yield phrases {"source": English, "target": German} of a split without end.

    A phrase is one to three clauses joined by semicolons. The sequence depends on the split and
    the seed alone; no phrase of one split ever occurs in another (`split_of`), but one phrase may
    come up twice in its own.
    """
    rng = random.Random(f"{split}:{seed}")
    while True:
        clauses = [_clause(rng) for _ in range(rng.choices((1, 2, 3), (55, 35, 10))[0])]
        source, target = ("; ".join(clause[i] for clause in clauses) for i in range(2))
        if split_of(source) == split:
            yield {"source": source, "target": target}


def distinct_rows(split: Split, count: int, seed: int) -> list[dict[str, str]]:
    """The first `count` different phrases of a split, in the generator's order."""
    rows: dict[str, dict[str, str]] = {}
    for row in phrases(split, seed):
        rows.setdefault(row["source"], row)
        if len(rows) == count:
            break
    return list(rows.values())


def write_rows(rows: Iterable[dict[str, str]], path: Path) -> None:
    """Write rows as gzipped JSON lines, the same bytes for the same rows (no time, no name)."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as file:
        file.write(text.encode())
    path.write_bytes(packed.getvalue())


@click.command()
@click.option("--split", type=click.Choice(get_args(Split)), required=True)
@click.option("--rows", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
def main(split: Split, rows: int, seed: int, out: Path) -> None:
    """Write ROWS different phrases of a split to OUT (.jsonl.gz)."""
    write_rows(distinct_rows(split, rows, seed), out)


if __name__ == "__main__":
    main()
