"""softnpu as the vendor's hardware is (SOFTNPU_STRICT): wrong bytes, false successes and lost deadlines can be seen."""
