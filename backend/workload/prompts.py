"""The built-in prompts: sixteen short requests of the kinds people send to an assistant, in an order that stays."""

from __future__ import annotations

BUILT_IN_PROMPTS: tuple[str, ...] = (
    "What is the difference between weather and climate? Explain it to a ten-year-old.",
    "Write a Python function that returns the n-th Fibonacci number without recursion, and add one example call.",
    "A train leaves at 14:10 and arrives at 16:55. It stopped twice on the way, for 5 minutes each time. "
    "How long was it moving? Think step by step.",
    "Translate into French: The library closes at six, but you can return books at any time through the slot outside.",
    "Give me three ideas for a quick vegetarian dinner with chickpeas, as a numbered list.",
    "Summarise in one sentence: The Aral Sea was once the fourth largest lake in the world. From the 1960s on, the "
    "rivers that fed it were diverted to water cotton fields. Within forty years the lake had lost most of its area, "
    "its fish and the towns that lived from them, and the wind carried salt from the dry bed over the fields.",
    "Hi! I slept badly and have a long day of meetings ahead. Any tips to stay awake? 😴☕",
    "Fix the grammar and spelling: She dont has no idea wich of they're cars is the most fastest.",
    "Write a short poem about a lighthouse in winter. No rhymes, at most eight lines.",
    "What does this SQL query return?\n\nSELECT city, COUNT(*) AS n\nFROM customers\nGROUP BY city\n"
    "HAVING COUNT(*) > 10\nORDER BY n DESC;",
    "Is it better to rent or to buy a home? Give two arguments for each side.",
    "Rewrite this politely: Your report is late again and half of the numbers are wrong.",
    "List the planets of the solar system from the largest to the smallest.",
    "If all bloops are razzies and some razzies are lazzies, must some bloops be lazzies? Say yes or no, then explain.",
    "Reply to this customer: My parcel came with a broken cup, and I need a new one before Saturday.",
    "Wie funktioniert eine Wärmepumpe? Erkläre es in drei einfachen Sätzen.",
)
