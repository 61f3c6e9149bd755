"""What the Python clients are asked for: a model of pydantic, which all of them take."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

City = Literal["Bern", "Basel", "Chur"]
Days = Literal[1, 2, 3]


class Trip(BaseModel):
    """A trip."""

    # A schema that does not forbid further fields allows them, and the stories' model ends none.
    model_config = ConfigDict(extra="forbid")
    city: City
    by_train: bool


class Weather(BaseModel):
    """Arguments of get_weather."""

    model_config = ConfigDict(extra="forbid")
    city: City
    days: Days


def get_weather(city: City, days: Days) -> str:
    """Tell the weather."""
    return f"sunny in {city} for {days} days"
