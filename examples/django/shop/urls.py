from django.urls import path

from . import views

urlpatterns = [
    path("orders", views.create_order),
    path("orders/<int:number>", views.show_order),
    path("stock/<str:sku>", views.stock),
    path("imports/<slug:supplier>", views.start_import),
]
