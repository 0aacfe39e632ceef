"""A live page that all of these tests ask, served once."""

import pytest
from cards import empty_cache
from live import ADAMW, USABLE_MIB, body, question, served

from bigdit.live.answers import Answers
from bigdit.live.asked import Asked
from bigdit.report.page import page as page_of
from bigdit.search.answer import make_plan
from bigdit.search.finding.evidence import Evidence
from bigdit.search.telling.ways import ways


@pytest.fixture(scope="session")
def plan():
    return make_plan(question())


@pytest.fixture(scope="session")
def offered(plan):
    """The plan's ways on emulated cards that are too small for some of them, at any micro-batch."""
    changed = {"gpu": plan.question.gpu.model_copy(update={"usable_mib": USABLE_MIB}), "device": "emulated"}
    changed["global_batch_size"] = None
    small = plan.model_copy(update={"question": plan.question.model_copy(update=changed)})
    return small, ways(small, lambda count: question(gpus=count).model_copy(update=changed))


@pytest.fixture(scope="session")
def live(offered, tmp_path_factory):
    """Its server, for which nothing is kept that ran before."""
    plan, offers = offered
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path_factory.mktemp("cache"))))
        with served(page_of(plan, live=offers), Answers(offers, Evidence())) as made:
            made.answers.warm(Asked(**body(ADAMW, 1, 0)))
            yield made
