"""Contents of a Stripe server, read by Stripe's own library.

read_stripe.py BASE customer    makes a customer and prints its id
read_stripe.py BASE intents     one JSON line for each PaymentIntent
"""
import json
import sys

import stripe

base, command = sys.argv[1:]
stripe.api_base = base
stripe.api_key = "sk_test_reader"
stripe.max_network_retries = 0

if command == "customer":
    print(stripe.Customer.create(description="one who pays").id)
elif command == "intents":
    for intent in stripe.PaymentIntent.list(limit=10).auto_paging_iter():
        intent = intent.to_dict()
        error = intent["last_payment_error"] or {}
        print(json.dumps({
            "id": intent["id"],
            "status": intent["status"],
            "amount": intent["amount"],
            "currency": intent["currency"],
            "customer": intent["customer"],
            "metadata": intent["metadata"],
            "error": error.get("code"),
        }))
