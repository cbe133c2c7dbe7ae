"""A reward function as verl calls it."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    right = solution_str.strip() == str(ground_truth)
    return {"score": right + bonus, "acc": float(right), "source": data_source}
