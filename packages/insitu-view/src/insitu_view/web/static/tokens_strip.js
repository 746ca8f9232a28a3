// A scrolling strip of up to a million tokens: fetched in pages of 4,096, drawn in parts of about 512 around what
// is in view. Colours are CSS highlights over short text nodes: no element per token. Chromium draws every
// highlight in the document again when one changes, so what is not near the view must not be there.
import { bytes } from "./api.js";
import { controlName, isHidden } from "./text.js";
import { decodeTokens, endsOf, PAGE_TOKENS, pageOf, PART_TOKENS, PARTS, startsOf, textOf, tokenOfOffset } from "./tokens_page.js";
import { kindsOf, TONES_OF_TOKENS } from "./tokens_signals.js";

const NODE_TOKENS = 256;
const MAX_PARTS = 16;

/** Highlights are shared by all pages: one per tone. */
function highlights() {
  if (!("highlights" in CSS)) return null;
  const found = {};
  for (const tone of TONES_OF_TOKENS) {
    const name = `tok-${tone}`;
    if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
    found[tone] = CSS.highlights.get(name);
  }
  return found;
}

export class TokenStrip {
  /**
   * @param {HTMLElement} box the scrolling element
   * @param {{total: number, pathOf: (start: number, count: number) => string, onView: (first: number, last: number) => void,
   *   onPage: (page: TokenPage) => void, onError: (message: string) => void}} options
   */
  constructor(box, options) {
    this.box = box;
    this.options = options;
    this.parts = Math.ceil(options.total / PART_TOKENS);
    /** @type {Map<number, Promise<TokenPage>>} */
    this.loading = new Map();
    /** @type {Map<number, TokenPage>} */
    this.ready = new Map();
    /** First token of each part, by page. @type {Map<number, number[]>} */
    this.starts = new Map();
    /** @type {Map<number, any>} */
    this.shown = new Map();
    this.heights = new Map();
    this.rowsPerToken = 0.9;
    /** @type {Float64Array|null} */
    this.tops = null;
    this.paint = { signal: null, only: null, context: {} };
    this.spaces = false;
    this.marked = -1;
    this.tones = highlights();
    this.inner = document.createElement("div");
    this.inner.className = "strip-inner";
    box.replaceChildren(this.inner);
    this.onScroll = () => this.update();
    box.addEventListener("scroll", this.onScroll, { passive: true });
    this.width = box.clientWidth;
    this.resize = new ResizeObserver(() => this.resized());
    this.resize.observe(box);
  }

  /** Lines wrap elsewhere in another width: measure again, and keep what is read in its place. */
  resized() {
    if (this.box.clientWidth !== this.width) {
      this.width = this.box.clientWidth;
      const { index, share } = this.partAt(this.box.scrollTop);
      this.heights.clear();
      this.measure([...this.shown.values()].filter((entry) => entry.page));
      this.box.scrollTop = this.topOf(index) + share * this.heightOf(index);
    }
    this.update();
  }

  destroy() {
    this.destroyed = true;
    this.box.removeEventListener("scroll", this.onScroll);
    this.resize.disconnect();
    for (const index of [...this.shown.keys()]) this.hide(index);
    this.tones?.here.clear();
  }

  /** @returns {Promise<TokenPage>} */
  load(index) {
    if (!this.loading.has(index)) {
      const start = index * PAGE_TOKENS;
      const page = bytes(this.options.pathOf(start, Math.min(PAGE_TOKENS, this.options.total - start))).then(decodeTokens);
      page.then((found) => {
        this.starts.set(index, startsOf(found));
        this.ready.set(index, found);
        this.options.onPage(found);
      }, (error) => (this.loading.delete(index), this.options.onError(error.message)));
      this.loading.set(index, page);
      // Twenty pages are about 1.6 MB: the oldest that is not shown goes.
      const kept = new Set([index, ...[...this.shown.keys()].map(pageOf)]);
      for (const old of this.loading.keys()) if (this.loading.size > 20 && !kept.has(old)) this.loading.delete(old), this.ready.delete(old);
    }
    return /** @type {Promise<TokenPage>} */ (this.loading.get(index));
  }

  /** The first token of a part; by the even division until its page is there. */
  startOf(index) {
    if (index >= this.parts) return this.options.total;
    return this.starts.get(pageOf(index))?.[index % PARTS] ?? index * PART_TOKENS;
  }

  tokensIn(index) {
    return this.startOf(index + 1) - this.startOf(index);
  }

  partOf(token) {
    let index = Math.min(this.parts - 1, Math.floor(token / PART_TOKENS));
    if (this.startOf(index) > token) index--;
    return index;
  }

  heightOf(index) {
    return this.heights.get(index) ?? Math.max(20, PART_TOKENS * this.rowsPerToken);
  }

  /** Where each part begins, and the end of the last; estimated until a part was drawn. */
  topOf(index) {
    if (!this.tops) {
      this.tops = new Float64Array(this.parts + 1);
      for (let i = 0; i < this.parts; i++) this.tops[i + 1] = this.tops[i] + this.heightOf(i);
    }
    return this.tops[index];
  }

  partAt(y) {
    let [low, high] = [0, this.parts - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.topOf(middle + 1) > y) high = middle;
      else low = middle + 1;
    }
    return { index: low, share: Math.min(1, Math.max(0, (y - this.topOf(low)) / Math.max(1, this.heightOf(low)))) };
  }

  /** Show the parts in view and one beside them; place them by their tops. */
  update() {
    if (this.destroyed || !this.parts) return;
    const first = this.partAt(this.box.scrollTop);
    const last = this.partAt(this.box.scrollTop + this.box.clientHeight);
    const from = Math.max(0, first.index - (first.share < 0.3 ? 1 : 0));
    const to = Math.min(this.parts - 1, last.index + (last.share > 0.7 ? 1 : 0), from + MAX_PARTS - 1);
    for (const index of [...this.shown.keys()]) if (index < from || index > to) this.hide(index);
    const added = [];
    for (let index = from; index <= to; index++) if (!this.shown.has(index)) added.push(this.show(index));
    this.draw(added.filter((entry) => entry.page));
    this.place();
    const top = this.box.getBoundingClientRect().top;
    this.options.onView(this.tokenNear(first, top), this.tokenNear(last, top + this.box.clientHeight));
  }

  /** The first token whose line ends below `y` of the window; by its share of the height until its page is drawn. */
  tokenNear({ index, share }, y) {
    const entry = this.shown.get(index);
    if (!entry?.page) return Math.round(this.startOf(index) + share * this.tokensIn(index));
    let [low, high] = [entry.from, entry.to];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (placeOf(this.rangeOf(entry, middle, middle)).bottom > y) high = middle;
      else low = middle + 1;
    }
    return entry.page.header.start + low;
  }

  place() {
    this.inner.style.height = `${this.topOf(this.parts)}px`;
    for (const [index, { element }] of this.shown) element.style.top = `${this.topOf(index)}px`;
  }

  show(index) {
    const element = document.createElement("div");
    element.className = "tokpage";
    const page = this.ready.get(pageOf(index)) ?? null;
    const entry = { index, element, page, from: 0, to: 0, pieces: [], ranges: [] };
    this.shown.set(index, entry);
    this.inner.append(element);
    if (!page) this.load(pageOf(index)).then((loaded) => this.arrived(entry, loaded), () => {});
    return entry;
  }

  arrived(entry, page) {
    if (this.destroyed || this.shown.get(entry.index) !== entry) return;
    entry.page = page;
    this.draw([entry]);
    this.update();
  }

  /** Fill all, then measure all: a height read between two changes lays the document out once more. */
  draw(entries) {
    if (!entries.length) return;
    for (const entry of entries) {
      [entry.from, entry.to] = [entry.index, entry.index + 1].map((index) => this.startOf(index) - entry.page.header.start);
      this.fill(entry);
    }
    this.measure(entries);
    for (const entry of entries) this.colour(entry);
  }

  hide(index) {
    const entry = this.shown.get(index);
    this.uncolour(entry);
    entry.element.remove();
    this.shown.delete(index);
  }

  /** Keep what is read in its place when parts above turn out taller or shorter than estimated. */
  measure(entries) {
    if (!entries.length) return;
    const heights = entries.map((entry) => entry.element.offsetHeight);
    if (!this.heights.size) this.rowsPerToken = heights[0] / Math.max(1, this.tokensIn(entries[0].index));
    let shift = 0;
    entries.forEach(({ index }, i) => {
      const [old, end] = [this.heightOf(index), this.topOf(index + 1)];
      if (end <= this.box.scrollTop + 1) shift += heights[i] - old;
      this.heights.set(index, heights[i]);
    });
    this.tops = null;
    this.place();
    if (shift) this.box.scrollTop += shift;
  }

  /** Fill a part: a text node per 256 tokens, boxes for invisible characters. */
  fill(entry) {
    const { page } = entry;
    entry.pieces = [];
    const fragment = document.createDocumentFragment();
    const ends = endsOf(page);
    const text = textOf(page);
    for (let i = entry.from; i < entry.to; i += NODE_TOKENS) {
      const start = i ? ends[i - 1] : 0;
      this.addText(entry, fragment, text, start, ends[Math.min(i + NODE_TOKENS, entry.to) - 1]);
    }
    entry.element.replaceChildren(fragment);
  }

  addText(entry, parent, text, start, stop) {
    let from = start;
    const flush = (to) => {
      if (to <= from) return;
      const shown = text.slice(from, to);
      const node = document.createTextNode(this.spaces ? shown.replaceAll(" ", "·").replaceAll("\t", "→") : shown);
      parent.append(node);
      entry.pieces.push({ node, start: from, stop: to, box: false });
    };
    for (let at = start; at < stop; at++) {
      const mark = this.spaces && text[at] === "\n" ? "↵" : isHidden(text, at) ? controlName(String.fromCodePoint(text.codePointAt(at) ?? 0)) : "";
      if (!mark) continue;
      flush(at);
      const size = mark === "↵" ? 0 : text.codePointAt(at) > 0xffff ? 2 : 1;
      const box = document.createElement("span");
      box.className = mark === "↵" ? "newline" : "ctl";
      box.textContent = mark;
      parent.append(box);
      if (size) entry.pieces.push({ node: box.firstChild, start: at, stop: at + size, box: true });
      from = at + size;
      at += Math.max(0, size - 1);
    }
    flush(stop);
  }

  /** The node and offset of a position in the text of a page. */
  locate(entry, offset, end) {
    let [low, high] = [0, entry.pieces.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (entry.pieces[middle].stop > offset || (end && entry.pieces[middle].stop === offset)) high = middle;
      else low = middle + 1;
    }
    const piece = entry.pieces[low];
    if (!piece) return null;
    return { node: piece.node, offset: piece.box ? (end ? piece.node.length : 0) : Math.min(piece.node.length, Math.max(0, offset - piece.start)) };
  }

  rangeOf(entry, first, last) {
    const ends = endsOf(entry.page);
    const start = this.locate(entry, first ? ends[first - 1] : 0, false);
    const stop = this.locate(entry, ends[last], true);
    if (!start || !stop) return null;
    return new StaticRange({ startContainer: start.node, startOffset: start.offset, endContainer: stop.node, endOffset: stop.offset });
  }

  setPaint(paint) {
    this.paint = paint;
    for (const entry of this.shown.values()) if (entry.page) this.colour(entry);
  }

  setSpaces(spaces) {
    this.spaces = spaces;
    const drawn = [...this.shown.values()].filter((entry) => entry.page);
    drawn.forEach((entry) => this.uncolour(entry));
    this.draw(drawn);
  }

  /** Tokens in a row with the same tone are one range. */
  colour(entry) {
    this.uncolour(entry);
    this.mark(entry);
    const { signal, only, context } = this.paint;
    if (!signal || !this.tones) return;
    const { page } = entry;
    const kinds = kindsOf(signal, page, context);
    const tones = signal.buckets.map((bucket, n) => (only === null || only === n ? bucket.tone || null : null));
    let from = entry.from;
    let tone = tones[kinds[from]] ?? null;
    for (let i = from + 1; i <= entry.to; i++) {
      const next = i < entry.to ? (tones[kinds[i]] ?? null) : null;
      if (next === tone) continue;
      if (tone) {
        const range = this.rangeOf(entry, from, i - 1);
        if (range) {
          this.tones[tone].add(range);
          entry.ranges.push([tone, range]);
        }
      }
      [from, tone] = [i, next];
    }
  }

  uncolour(entry) {
    for (const [tone, range] of entry.ranges) this.tones[tone].delete(range);
    entry.ranges = [];
  }

  /** The token under a point of the window, or null. */
  tokenAt(x, y) {
    const caret = document.caretPositionFromPoint?.(x, y);
    const old = caret ? null : document.caretRangeFromPoint?.(x, y);
    const node = caret?.offsetNode ?? old?.startContainer;
    const offset = caret?.offset ?? old?.startOffset ?? 0;
    for (const entry of this.shown.values()) {
      const piece = entry.page && node && entry.element.contains(node) ? entry.pieces.find((p) => p.node === node) : null;
      if (!piece) continue;
      const at = piece.box ? piece.start : piece.start + offset;
      return entry.page.header.start + tokenOfOffset(endsOf(entry.page), at);
    }
    return null;
  }

  /** Mark a token and scroll to it, or only scroll; resolves to its page. */
  async goTo(token, scroll = true, mark = true) {
    const page = await this.load(Math.floor(token / PAGE_TOKENS));
    const index = this.partOf(token);
    const local = token - page.header.start;
    // Heights are estimates until parts are drawn: the first jump may end beside the part.
    for (let jumps = 0; scroll && jumps < 4 && !this.shown.get(index)?.page; jumps++) {
      this.box.scrollTop = this.topOf(index) + (this.heightOf(index) * (token - this.startOf(index))) / this.tokensIn(index) - this.box.clientHeight / 3;
      this.update();
    }
    if (mark) this.marked = token;
    const entry = this.shown.get(index);
    const range = entry?.page && (mark ? this.mark(entry) : this.rangeOf(entry, local, local));
    if (range && scroll) this.reveal(range);
    return page;
  }

  /** Mark the chosen token if it is in this part; returns its range. */
  mark(entry) {
    const local = this.marked - entry.page.header.start;
    if (!(local >= entry.from && local < entry.to)) return null;
    const range = this.rangeOf(entry, local, local);
    this.tones?.here.clear();
    if (range) this.tones?.here.add(range);
    return range;
  }

  reveal(range) {
    const [at, box] = [placeOf(range), this.box.getBoundingClientRect()];
    // The box may end below the window.
    const bottom = Math.max(box.top + 60, Math.min(box.bottom, innerHeight));
    if (at.top < box.top || at.bottom > bottom) this.box.scrollTop += at.top - box.top - (bottom - box.top) / 3;
  }
}

function placeOf(range) {
  const live = document.createRange();
  live.setStart(range.startContainer, range.startOffset);
  live.setEnd(range.endContainer, range.endOffset);
  return live.getBoundingClientRect();
}

