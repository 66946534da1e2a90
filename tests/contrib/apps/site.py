"""A Django project whose admin shows the locks of tests.admin.apps.desk: served over HTTP, with a
database of its own, until its input ends."""

from __future__ import annotations

import os
import sys
from socketserver import ThreadingMixIn
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import django
from django.conf import settings
from django.urls import path

PASSWORD = "secret"


def configure(database: str) -> None:
    contrib = ("admin", "auth", "contenttypes", "messages", "sessions", "staticfiles")
    settings.configure(
        SECRET_KEY="site",
        ALLOWED_HOSTS=["127.0.0.1"],
        DEBUG=True,
        ROOT_URLCONF="tests.contrib.apps.site",
        STATIC_URL="/static/",
        INSTALLED_APPS=[f"django.contrib.{name}" for name in contrib]
        + ["celery_relock.contrib.django"],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        # Django's own takes half a second for each login.
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        USE_TZ=True,
        USE_THOUSAND_SEPARATOR=True,
    )


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def users() -> None:
    """root may do all; viewer sees, freer sees and frees; nobody has neither permission."""
    from django.contrib.auth.models import Permission, User

    User.objects.create_superuser("root", password=PASSWORD)
    for name, codes in (("viewer", ["view_lock"]), ("freer", ["view_lock", "free_lock"]), ("nobody", [])):  # fmt: skip  # noqa: E501
        user = User.objects.create_user(name, password=PASSWORD, is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=codes))


def main() -> None:
    configure(sys.argv[1])
    import tests.admin.apps.desk  # noqa: F401  # the current app of this process

    django.setup()
    from django.contrib import admin
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.checks import run_checks
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application

    urlpatterns.append(path("admin/", admin.site.urls))
    call_command("migrate", verbosity=0)
    call_command("makemigrations", "celery_relock", check=True, dry_run=True, verbosity=0)
    users()
    found = run_checks(tags=["relock"], include_deployment_checks=True)
    print(*[f"{each.id}: {each.msg}" for each in found], sep="; ", flush=True)
    application = StaticFilesHandler(get_wsgi_application())
    server = make_server("127.0.0.1", int(os.environ.get("PORT", 0)), application, _Server, _Quiet)
    Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


urlpatterns: list[object] = []

if __name__ == "__main__":
    sys.modules["tests.contrib.apps.site"] = sys.modules["__main__"]
    main()
