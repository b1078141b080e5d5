"""The playground in use: on a phone, by keyboard, and with long prompts."""

import re

import pytest

from tests.support.server.browser_pages import open_page, run, wait_until

PHONE = {"width": 390, "height": 844}
# Longer counts in the note of a pass, in one call: the page may draw the pass again between two. Returns the note, and
# whether its heading shows all of it.
LENGTHEN_COUNTS = """() => {
    const [title, note] = ["#tree-title", "#tree-note"].map((id) => document.querySelector(id));
    const heading = note.closest("h2");
    title.textContent = "Last pass with a draft (1234)";
    note.textContent = note.textContent.replace("1 of 2", "16 of 16");
    return [note.textContent, heading.scrollWidth <= heading.clientWidth];
}"""
IN_VIEW = "e => { const b = e.getBoundingClientRect(); return b.top >= 0 && b.bottom <= innerHeight }"


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_a_phone_scrolls_to_the_text_once_there_is_some(browser, served, fake, motion):
    with open_page(browser, served[1], viewport=PHONE, reduced_motion=motion) as page:
        page.check("#compare")
        page.focus("#prompt")
        assert not page.eval_on_selector("#output", IN_VIEW)
        run(page, "origins")
        wait_until(lambda: page.eval_on_selector("#output", IN_VIEW), "the text is out of view")
        assert page.eval_on_selector(".figures", IN_VIEW)
        page.focus("#prompt")
        run(page, "origins", max_tokens="0")  # refused: the reason stands in the form
        wait_until(lambda: page.eval_on_selector("#error", IN_VIEW), "the error is out of view")


def test_reduced_motion_is_respected(browser, served, fake):
    for motion, behaviour in (("no-preference", "smooth"), ("reduce", "instant")):
        with open_page(browser, served[1], viewport=PHONE, reduced_motion=motion) as page:
            page.evaluate("""() => {
                window.seen = [];
                const scroll = Element.prototype.scrollIntoView;
                Element.prototype.scrollIntoView = function (how) { seen.push(how.behavior); scroll.call(this, how) };
            }""")
            run(page, "origins")
            assert page.evaluate("seen") == [behaviour]


def test_the_form_stays_where_it_is_beside_the_text(page):
    run(page, "origins")
    assert page.evaluate("[scrollY, document.querySelector('.side').scrollTop]") == [0, 0]
    assert page.eval_on_selector("#prompt", IN_VIEW)


def test_a_phone_can_stop_a_run_whose_form_is_out_of_view(browser, served, fake):
    with open_page(browser, served[1], viewport=PHONE) as page:
        page.fill("#prompt", "endless")
        page.click("#run")
        page.wait_for_selector("#output .t >> nth=10")
        wait_until(lambda: page.eval_on_selector("#output", IN_VIEW), "the text is out of view")
        wait_until(lambda: page.eval_on_selector("#stop", IN_VIEW), "no way to stop")
        page.click("#stop")
        page.wait_for_selector("body:not(.busy)")


@pytest.mark.parametrize("width", [360, 1280])
def test_the_name_of_the_drafter_is_never_cut(browser, served, fake, width):
    with open_page(browser, served[1], viewport={"width": width, "height": 800}) as page:
        wait_until(lambda: page.inner_text("#model") == "fake-model · drafter ngram", "no model")
        name = "an-organisation-with-a-name/a-model-with-a-long-name-8B-Instruct · drafter suffix+mlp_speculator"
        page.eval_on_selector("#model", "(e, name) => { e.textContent = name }", name)
        sizes = page.eval_on_selector("#model", "e => [e.scrollWidth - e.clientWidth, e.scrollHeight - e.clientHeight]")
        assert sizes == [0, 0]
        assert page.eval_on_selector("#model", IN_VIEW)
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_prompts_box_is_as_high_as_its_text_up_to_a_bound(page):
    heights = []
    for lines in (1, 3, 9, 400):
        page.fill("#prompt", "\n".join(["x"] * lines))
        heights.append(page.locator("#prompt").bounding_box()["height"])
    assert heights[0] <= heights[1] < heights[2] < heights[3] <= 0.4 * 900 + 1
    assert heights[1] < 100
    page.fill("#prompt", "x")
    assert page.locator("#prompt").bounding_box()["height"] == heights[0]
    page.fill("#prompt", "\n".join(["x"] * 9))
    assert page.eval_on_selector("#prompt", "e => e.scrollHeight <= e.clientHeight"), "some of the text is hidden"


def test_the_last_pass_with_a_draft_stays_in_view(page):
    run(page, "trailing")
    assert page.inner_text("#tree-title") == "Last pass with a draft (2)"
    assert page.inner_text("#tree-note") == "1 of 2 tokens accepted"
    page.select_option("#draft", "0")  # plain decoding: no pass has one
    run(page, "trailing")
    assert page.inner_text("#tree-title") == "Last pass (4)"
    assert page.inner_text("#tree-note") == "no draft"


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_the_counts_of_a_pass_are_never_cut(browser, served, fake, width):
    with open_page(browser, served[1], viewport={"width": width, "height": 800}) as page:
        run(page, "trailing")
        note, is_whole = page.evaluate(LENGTHEN_COUNTS)
        assert note == "16 of 16 tokens accepted"
        assert is_whole


def test_a_click_pins_the_pass_of_a_token(page):
    run(page, "origins")
    page.click("#output .t.corrected >> nth=0")
    assert page.inner_text("#tree-title") == "Pass 3, pinned"
    page.hover("h1")
    assert page.inner_text("#tree-title") == "Pass 3, pinned"
    assert page.locator("#tree .node.rejected").count() == 2
    assert page.locator("#output .pinned").all_text_contents() == [":\n"]
    page.hover("#output .t.accepted >> nth=0")
    assert page.inner_text("#tree-title") == "Pass 2"
    page.hover("h1")
    assert page.inner_text("#tree-title") == "Pass 3, pinned"
    page.click("#output .t.corrected >> nth=0")
    page.hover("h1")
    assert page.inner_text("#tree-title") == "Last pass (5)"
    assert page.locator("#output .pinned").count() == 0


def test_one_pass_is_pinned_over_both_texts_and_none_after_a_new_run(page):
    page.check("#compare")
    run(page, "origins")
    page.click("#output .t >> nth=1")
    page.click("#plain-output .t >> nth=3")
    page.hover("h1")
    assert page.inner_text("#tree-title") == "Pass 4, pinned"
    assert page.locator(".pinned").count() == 1
    run(page, "trailing")
    assert page.locator(".pinned").count() == 0
    assert page.inner_text("#tree-title") == "Last pass with a draft (2)"


def test_keys_pin_a_pass_and_escape_unpins_it(page):
    run(page, "origins")
    page.focus("#output")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    wait_until(lambda: page.text_content("#output .here") == " mean", "the next pass")
    page.keyboard.press("Enter")
    assert page.inner_text("#tree-title") == "Pass 2, pinned"
    page.keyboard.press("Enter")
    assert page.inner_text("#tree-title") == "Pass 2"
    page.keyboard.press(" ")
    page.focus("#run")
    assert page.inner_text("#tree-title") == "Pass 2, pinned"
    page.keyboard.press("Escape")
    assert page.inner_text("#tree-title") == "Last pass (5)"


def test_a_tap_on_a_phone_shows_the_pass(browser, served, fake):
    with open_page(browser, served[1], viewport=PHONE, has_touch=True, is_mobile=True, reduced_motion="reduce") as page:
        run(page, "origins")
        page.tap("#output .t.corrected >> nth=0")
        assert page.inner_text("#tree-title").startswith("Pass 3")
        assert page.locator("#output .pinned").count() == 1


def read_seconds(page, chart):
    """Return the labels of a chart's time axis."""
    labels = page.locator(f"{chart} .axes text[text-anchor=middle]").all_text_contents()
    return [float(label.removesuffix(" s")) for label in labels]


def test_charts_begin_at_their_first_point_and_end_at_their_last(page):
    for _ in range(3):  # under load the text may arrive at once, and an axis has 10 ms at least
        run(page, "long 300")
        if read_seconds(page, "#rate-chart")[-1] - read_seconds(page, "#rate-chart")[0] > 0.015:
            break
    for chart in ("#length-chart", "#rate-chart"):
        across = [float(x) for x in re.findall(r"[ML]([\d.]+)", page.get_attribute(f"{chart} .line.main", "d"))]
        ends = page.eval_on_selector(f"{chart} .axes line", "e => [e.x1.baseVal.value, e.x2.baseVal.value]")
        assert [min(across), max(across)] == pytest.approx(ends, abs=1)
        assert len(read_seconds(page, chart)) >= 2
