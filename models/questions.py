"""Questions that make a chat model write training text: tasks about topics, all written for this project."""

from collections.abc import Iterator

import numpy as np

TASKS = (
    "Explain {} to a ten-year-old child.",
    "Write a short story about {}.",
    "What are five interesting facts about {}?",
    "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me step-by-step instructions for somebody who wants to learn about {}.",
    "Write a Python function that has to do with {}, and explain it.",
    "Summarize what everybody should know about {}.",
    "Write an email to a friend about {}.",
    "Write a dialogue between a teacher and a student about {}.",
    "How did {} change over the last hundred years?",
    "Make a list of ten ideas for a school project about {}.",
    "What is the history of {}?",
    "Compare {} with something similar.",
    "What questions should I ask an expert on {}?",
    "Write the introduction of an essay on {}.",
    "Why does {} matter?",
    'Correct the mistakes in this sentence: "I has learn many thing about {} and it are fun."',
    "What would happen to the world without {}?",
    "Write a product description that mentions {}.",
    "Tell me a joke about {} and explain why it is funny.",
    "Describe a day in the life of someone who works with {}.",
    "What are common misunderstandings about {}?",
    "Give a beginner's plan for a week of {}.",
)
TOPICS = (
    "the ocean", "black holes", "baking bread", "the French Revolution", "electric cars", "photosynthesis", "chess", "gardening",
    "the human heart", "volcanoes", "jazz music", "recycling", "the Roman Empire", "artificial intelligence", "bees", "soccer",
    "the water cycle", "computer games", "mountains", "vaccines", "the moon", "money", "friendship", "trains", "dinosaurs",
    "painting", "the internet", "coffee", "democracy", "sorting numbers", "earthquakes", "cats", "learning a language", "sleep",
    "climate change", "fractions", "robots", "the stock market", "bridges", "rainforests", "cooking pasta", "the brain", "yoga",
    "Ancient Egypt", "solar energy", "reading books", "bicycles", "prime numbers", "penguins", "photography", "the Cold War",
    "healthy food", "gravity", "a text file", "teamwork", "castles", "bacteria", "a small business", "dancing", "rivers",
    "job interviews", "the alphabet", "wind turbines", "a shopping list", "whales", "chocolate", "the printing press", "DNA",
    "camping", "public libraries", "a calendar", "lightning", "marathon running", "the solar system", "dogs", "stress", "maps",
    "the Great Wall of China", "theatre", "passwords", "birds", "tea", "time management", "the periodic table", "snow",
    "kindness", "airplanes", "statistics", "the violin", "farming", "a lost key", "deserts", "museums", "the weather", "honesty",
    "magnets", "submarines", "spreadsheets", "butterflies", "city traffic", "the Olympic Games", "trees", "knitting",
    "a family dinner",
)  # fmt: skip
HELD_OUT_TOPICS = (
    "glaciers", "the piano", "probability", "honey", "the Industrial Revolution", "swimming", "wolves", "an old lighthouse",
    "vitamins", "a broken bicycle", "the telephone", "markets",
)  # fmt: skip


def questions(topics: tuple[str, ...], seed: int) -> Iterator[str]:
    """Yield questions without end; every task about every topic comes once before one repeats."""
    rng = np.random.default_rng(seed)
    while True:
        for i in rng.permutation(len(topics) * len(TASKS)):
            yield TASKS[i % len(TASKS)].format(topics[i // len(TASKS)])
