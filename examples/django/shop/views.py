"""A JSON interface without sessions."""

import json

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from .models import Order, Product
from .tasks import import_stock, sell, set_stock


@require_POST
def create_order(request: HttpRequest) -> JsonResponse:
    asked = json.loads(request.body)
    with transaction.atomic():
        product = get_object_or_404(Product, pk=asked["sku"])
        order = Order.objects.create(product=product, quantity=asked["quantity"])
        # Sent by the commit: a worker that is quick would look for an order that is not there yet.
        sell.delay_on_commit(product.pk, order.pk)
    return JsonResponse({"order": order.pk}, status=202)


@require_GET
def show_order(request: HttpRequest, number: int) -> JsonResponse:
    order = get_object_or_404(Order, pk=number)
    return JsonResponse({"state": order.state, "payment": order.payment})


@require_http_methods(["GET", "PUT"])
def stock(request: HttpRequest, sku: str) -> JsonResponse:
    if request.method == "PUT":
        count = json.loads(request.body)["count"]
        lock = set_stock.lock_for(sku, count)
        if not lock.acquire(blocking_timeout=2):  # a browser is waiting
            return JsonResponse({"error": "a sale is being paid, try again"}, status=409)
        try:
            set_stock(sku, count)  # acquires the same lock: re-enters
        finally:
            lock.release()
    return JsonResponse({"stock": get_object_or_404(Product, pk=sku).stock})


@require_POST
def start_import(request: HttpRequest, supplier: str) -> JsonResponse:
    return JsonResponse({"task": import_stock.delay(supplier).id}, status=202)
