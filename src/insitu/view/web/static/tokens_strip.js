// A scrolling strip of up to a million tokens: pages of 4,096 in the DOM, at most five, spacers for the rest.
// Colours are CSS highlights over short text nodes: no element per token.
import { bytes } from "./api.js";
import { controlName, isHidden } from "./text.js";
import { TONES_OF_TOKENS } from "./tokens_signals.js";

export const PAGE_TOKENS = 4096;
const NODE_TOKENS = 256;
const MAX_PAGES = 5;
const TYPES = { u32: Uint32Array, i32: Int32Array, f32: Float32Array, u8: Uint8Array };

/** @typedef {{header: any, columns: Record<string, any>, text: string, count: number}} TokenPage */

/** Decode the binary answer: header length, header, arrays, text. @param {Uint8Array} raw @returns {TokenPage} */
export function decodeTokens(raw) {
  const length = new DataView(raw.buffer, raw.byteOffset).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + length)));
  const body = raw.slice(4 + length);
  const columns = {};
  for (const { name, type, offset, length: n } of header.arrays) columns[name] = new TYPES[type](body.buffer, offset, n);
  const text = new TextDecoder().decode(body.subarray(header.text.offset, header.text.offset + header.text.bytes));
  return { header, columns, text: columns.end?.length ? text : "", count: header.count };
}

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
    this.pages = Math.ceil(options.total / PAGE_TOKENS);
    /** @type {Map<number, Promise<TokenPage>>} */
    this.loading = new Map();
    /** @type {Map<number, any>} */
    this.shown = new Map();
    this.heights = new Map();
    this.rowsPerToken = 0.9;
    this.paint = { signal: null, only: null, context: {} };
    this.spaces = false;
    this.marked = -1;
    this.tones = highlights();
    this.inner = document.createElement("div");
    this.inner.className = "strip-inner";
    box.replaceChildren(this.inner);
    this.onScroll = () => this.update();
    box.addEventListener("scroll", this.onScroll, { passive: true });
    this.resize = new ResizeObserver(() => {
      this.heights.clear();
      this.update();
    });
    this.resize.observe(box);
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
      page.then(this.options.onPage, (error) => (this.loading.delete(index), this.options.onError(error.message)));
      this.loading.set(index, page);
      // Twenty pages are about 1.6 MB: the oldest that is not shown goes.
      for (const old of this.loading.keys()) if (this.loading.size > 20 && !this.shown.has(old) && old !== index) this.loading.delete(old);
    }
    return /** @type {Promise<TokenPage>} */ (this.loading.get(index));
  }

  tokensIn(index) {
    return Math.min(PAGE_TOKENS, this.options.total - index * PAGE_TOKENS);
  }

  heightOf(index) {
    return this.heights.get(index) ?? Math.max(20, this.tokensIn(index) * this.rowsPerToken);
  }

  topOf(index) {
    let top = 0;
    for (let i = 0; i < index; i++) top += this.heightOf(i);
    return top;
  }

  pageAt(y) {
    let top = 0;
    for (let i = 0; i < this.pages; i++) {
      const height = this.heightOf(i);
      if (y < top + height) return { index: i, share: Math.max(0, (y - top) / height) };
      top += height;
    }
    return { index: Math.max(0, this.pages - 1), share: 1 };
  }

  /** Show the pages in view and one beside them; place them by their tops. */
  update() {
    if (this.destroyed || !this.pages) return;
    const first = this.pageAt(this.box.scrollTop);
    const last = this.pageAt(this.box.scrollTop + this.box.clientHeight);
    const from = Math.max(0, first.index - (first.share < 0.3 ? 1 : 0));
    const to = Math.min(this.pages - 1, last.index + (last.share > 0.7 ? 1 : 0), from + MAX_PAGES - 1);
    for (const index of [...this.shown.keys()]) if (index < from || index > to) this.hide(index);
    for (let index = from; index <= to; index++) if (!this.shown.has(index)) this.show(index);
    this.place();
    const tokenAt = ({ index, share }) => Math.round(index * PAGE_TOKENS + share * this.tokensIn(index));
    this.options.onView(tokenAt(first), tokenAt(last));
  }

  place() {
    this.inner.style.height = `${this.topOf(this.pages)}px`;
    for (const [index, { element }] of this.shown) element.style.top = `${this.topOf(index)}px`;
  }

  show(index) {
    const element = document.createElement("div");
    element.className = "tokpage";
    const entry = { index, element, page: null, pieces: [], ranges: [] };
    this.shown.set(index, entry);
    this.inner.append(element);
    this.load(index).then((page) => {
      if (this.destroyed || this.shown.get(index) !== entry) return;
      entry.page = page;
      this.fill(entry);
      this.measure(index, entry);
      this.colour(entry);
      this.waiting?.(index);
      this.update();
    }, () => {});
  }

  hide(index) {
    const entry = this.shown.get(index);
    this.uncolour(entry);
    entry.element.remove();
    this.shown.delete(index);
  }

  /** Keep what is read in its place when a page above turns out taller or shorter than estimated. */
  measure(index, entry) {
    const old = this.heightOf(index);
    const height = entry.element.offsetHeight;
    this.heights.set(index, height);
    if (entry.page.count === PAGE_TOKENS && this.heights.size === 1) this.rowsPerToken = height / PAGE_TOKENS;
    const above = this.topOf(index) + old <= this.box.scrollTop + 1;
    this.place();
    if (above) this.box.scrollTop += height - old;
  }

  /** Fill a page: a text node per 256 tokens, boxes for invisible characters. */
  fill(entry) {
    const { page } = entry;
    entry.pieces = [];
    const fragment = document.createDocumentFragment();
    const ends = endsOf(page);
    const text = textOf(page);
    for (let i = 0; i < page.count; i += NODE_TOKENS) {
      const start = i ? ends[i - 1] : 0;
      this.addText(entry, fragment, text, start, ends[Math.min(i + NODE_TOKENS, page.count) - 1]);
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
    for (const [index, entry] of this.shown) {
      if (!entry.page) continue;
      this.uncolour(entry);
      this.fill(entry);
      this.measure(index, entry);
      this.colour(entry);
    }
  }

  /** Tokens in a row with the same tone are one range. */
  colour(entry) {
    this.uncolour(entry);
    this.mark(entry);
    const { signal, only, context } = this.paint;
    if (!signal || !this.tones) return;
    const { page } = entry;
    let from = 0;
    let tone = toneOf(signal, only, context, page, 0);
    for (let i = 1; i <= page.count; i++) {
      const next = i < page.count ? toneOf(signal, only, context, page, i) : null;
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
    for (const [index, entry] of this.shown) {
      const piece = entry.page && node && entry.element.contains(node) ? entry.pieces.find((p) => p.node === node) : null;
      if (!piece) continue;
      const at = piece.box ? piece.start : piece.start + offset;
      return index * PAGE_TOKENS + tokenOfOffset(endsOf(entry.page), at);
    }
    return null;
  }

  /** Mark a token and scroll to it; resolves to its page. */
  async goTo(token, scroll = true) {
    const index = Math.floor(token / PAGE_TOKENS);
    const page = await this.load(index);
    const local = token - index * PAGE_TOKENS;
    // Heights are estimates until pages are drawn: the first jump may end beside the page.
    for (let jumps = 0; scroll && jumps < 4 && !this.shown.get(index)?.page; jumps++) {
      const ready = new Promise((done) => (this.waiting = (i) => i === index && done(undefined)));
      this.box.scrollTop = this.topOf(index) + (this.heightOf(index) * local) / page.count - this.box.clientHeight / 3;
      this.update();
      await Promise.race([ready, new Promise((done) => setTimeout(done, 5000))]);
    }
    this.marked = token;
    const entry = this.shown.get(index);
    const range = entry?.page && this.mark(entry);
    if (range && scroll) this.reveal(range);
    return page;
  }

  /** Mark the chosen token if it is on this page; returns its range. */
  mark(entry) {
    const local = this.marked - entry.index * PAGE_TOKENS;
    if (!(local >= 0 && local < entry.page.count)) return null;
    const range = this.rangeOf(entry, local, local);
    this.tones?.here.clear();
    if (range) this.tones?.here.add(range);
    return range;
  }

  reveal(range) {
    const live = document.createRange();
    live.setStart(range.startContainer, range.startOffset);
    live.setEnd(range.endContainer, range.endOffset);
    const [at, box] = [live.getBoundingClientRect(), this.box.getBoundingClientRect()];
    if (at.top < box.top || at.bottom > box.bottom) this.box.scrollTop += at.top - box.top - box.height / 3;
  }
}

/** Ends of the pieces; without a tokenizer the ids are the text. */
function endsOf(page) {
  if (!page.ends) {
    if (page.columns.end?.length) page.ends = page.columns.end;
    else {
      let end = 0;
      page.ends = Uint32Array.from(page.columns.id, (id) => (end += String(id).length + 1));
    }
  }
  return page.ends;
}

function textOf(page) {
  return page.columns.end?.length ? page.text : Array.from(page.columns.id, (id) => `${id} `).join("");
}

export function toneOf(signal, only, context, page, i) {
  for (let n = 0; n < signal.buckets.length; n++) {
    if (signal.buckets[n].test(page, i, context)) return only === null || only === n ? signal.buckets[n].tone || null : null;
  }
  return null;
}

function tokenOfOffset(ends, offset) {
  let [low, high] = [0, ends.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}
