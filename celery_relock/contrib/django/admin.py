"""The page in Django's admin: locks, their holders and waiters, and two buttons.

Each view reads from Redis. The database has only the log of what users did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nsmallest
from typing import Any

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote, unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.views.decorators.http import require_POST

from ...admin import LockInfo, Locks
from ...admin.look import held_for, once_each, permits_in
from ...admin.names import shown, typed
from ...engine.events import duration
from ...errors import RelockError
from .models import Lock

# Rows of a page.
_SHOWN = 200
_FREE = "celery_relock.free_lock"
# Instead of permits: all who hold the lock by then.
_ALL = "all"
# What no name has that Django's `quote` has gone over.
_DOT = "_2E"


@admin.register(Lock)
class LockAdmin(admin.ModelAdmin):  # type: ignore[misc]  # Django ships no types
    """Locks in the admin: no objects, so none of its forms."""

    def _nobody(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_add_permission = has_change_permission = has_delete_permission = _nobody

    def get_urls(self) -> list[Any]:
        def at(route: str, view: Callable[..., HttpResponse], name: str) -> Any:
            # Named as Django names its own, for the index page and the log's links.
            return path(route, self.admin_site.admin_view(view), name=f"celery_relock_lock_{name}")

        return [
            at("", self.list_view, "changelist"),
            at("free/", require_POST(self.free_view), "free"),
            at("<path:object_id>/change/", self.lock_view, "change"),
        ]

    def list_view(self, request: HttpRequest) -> HttpResponse:
        """All locks, those with the most waiters first; and, if asked, what a task does."""
        _need(self.has_view_permission(request))
        wanted = request.GET.get("q", "").strip()
        task_id = request.GET.get("task", "").strip()
        found: dict[str, Any] = {"q": wanted, "task": task_id}
        try:
            locks = self._locks(request)
            every = _find(locks, wanted)
            first = nsmallest(_SHOWN + 1, every, key=lambda lock: (-lock.waiting, lock.name))
            found["cut"] = len(first) > _SHOWN
            found["rows"] = [_row(lock) for lock in first[:_SHOWN]]
            if task_id:
                found["why"] = why = locks.why(locks.id_of(task_id))
                found["why_key"] = _quoted(why.lock)
        except RelockError as error:
            found["error"] = str(error)
        return self._page(request, "locks", "Locks", found)

    def lock_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """A lock, and its order: their holders, and the first of their waiters."""
        _need(self.has_view_permission(request))
        name = unquote(object_id.replace(_DOT, "."))
        found: dict[str, Any] = {"name": name, "shown": shown(name)}
        try:
            locks = self._locks(request).with_order(name)
            found["locks"] = list(map(_told, locks))
            permits = permits_in(locks)
            found["permits"] = _ALL if permits is None else " ".join(permits)
        except RelockError as error:
            found["error"] = str(error)
        return self._page(request, "lock", found["shown"], found)

    def free_view(self, request: HttpRequest) -> HttpResponse:
        """Release a lock, or cancel a task that is parked or awaited, after a confirmation."""
        _need(request.user.has_perm(_FREE))
        name, task_id = request.POST.get("name", ""), request.POST.get("task", "")
        permits = request.POST.get("permits", _ALL)
        if not name:
            messages.error(request, "The lock has no name: nothing was changed.")
            return HttpResponseRedirect(reverse("admin:celery_relock_lock_changelist"))
        what = "cancel" if request.POST.get("what") == "cancel" else "release"
        page = reverse("admin:celery_relock_lock_change", args=(_quoted(name),))
        back = HttpResponseRedirect(page)
        if request.POST.get("sure") != "yes":
            found = {"name": name, "shown": shown(name), "task": task_id, "permits": permits}
            found |= {"what": what, "back": back.url}
            return self._page(request, "sure", f"{what.capitalize()}?", found)
        try:
            done = self._free(self._locks(request), what, name, task_id, permits)
        except RelockError as error:
            messages.error(request, str(error))
            return back
        if done:
            # Not `log_change`: there is no object in the database.
            LogEntry.objects.create(
                user_id=request.user.pk,
                content_type=ContentType.objects.get_for_model(Lock),
                object_id=name,
                object_repr=shown(name)[:200],
                action_flag=CHANGE,
                change_message=done,
            )
            messages.success(request, done)
        else:
            messages.warning(request, "Nothing to do: it has changed meanwhile.")
        return back

    def _free(self, locks: Locks, what: str, name: str, task_id: str, permits: str) -> str:
        """What was done, "" for nothing. `permits`: those that the page showed, or `_ALL`."""
        if what == "cancel":
            return f"Cancelled: {task_id}." if locks.cancel(task_id) else ""
        only = None if permits == _ALL else permits.split()
        released = locks.release(name, task_id or None, permits=only)
        return f"Released by force: {', '.join(map(str, released))}." if released else ""

    def _locks(self, request: HttpRequest) -> Locks:
        config = apps.get_app_config("celery_relock")
        config.check_app()
        return Locks(
            config.celery,
            by=request.user.get_username(),
            origin=f"Django's admin, {request.META.get('REMOTE_ADDR', 'unknown')}",
        )

    def _page(
        self, request: HttpRequest, template: str, title: str, found: dict[str, Any]
    ) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            **found,
            "title": title,
            "may_free": request.user.has_perm(_FREE),
        }
        request.current_app = self.admin_site.name
        status = 503 if "error" in found else 200
        return TemplateResponse(request, f"celery_relock/{template}.html", context, status=status)


def _quoted(name: str) -> str:
    """A name as a part of an address. Browsers leave out the parts `.` and `..`."""
    return str(quote(name)).replace(".", _DOT)


def _find(locks: Locks, wanted: str) -> Iterator[LockInfo]:
    """The locks like what somebody typed, or pasted as the list shows it."""
    meant = dict.fromkeys((wanted, typed(wanted)))
    # A name can look like a pattern, and of a long one Redis has the beginning.
    named = (locks.get(each, 1) for each in meant if each)
    is_there = (lock for lock in named if not lock.idle)
    return once_each((is_there, *map(locks.find, dict.fromkeys(map(_pattern, meant)))))


def _pattern(wanted: str) -> str:
    if set(wanted) & set("*?["):
        return wanted
    part = wanted.replace("\\", r"\\")
    return f"*{part}*"


def _row(lock: LockInfo) -> dict[str, Any]:
    first = lock.holders[0] if lock.holders else None
    return {
        "lock": lock,
        "name": shown(lock.name),
        "key": _quoted(lock.name),
        "holder": first,
        "held": held_for(lock, first) if first else "",
    }


def _told(lock: LockInfo) -> dict[str, Any]:
    return {
        "lock": lock,
        "name": shown(lock.name),
        "holders": [(holder, held_for(lock, holder)) for holder in lock.holders],
        "waiters": [(waiter, duration(lock.at - waiter.since)) for waiter in lock.waiters],
    }


def _need(permission: bool) -> None:
    if not permission:
        raise PermissionDenied
