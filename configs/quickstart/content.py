"""What the phrases are made of: the CLDR codes they use and the templates they fill."""

from __future__ import annotations

from typing import Literal

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
