"""`manage.py migrate` of the Django companion."""

from __future__ import annotations

from django.core.management import call_command

from tests.company import instrument

if __name__ == "__main__":
    instrument.set_up()
    call_command("migrate", verbosity=0)
