// A page of tokens as it is sent: arrays and text, and the parts in which it is drawn.
export const PAGE_TOKENS = 4096;
export const PART_TOKENS = 512;
/** A part ends after a line end within so many tokens, else in the middle of a line. */
const LINE_TOKENS = 128;
export const PARTS = PAGE_TOKENS / PART_TOKENS;
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

/** The page of a part. */
export const pageOf = (part) => Math.floor(part / PARTS);

/** The first token of each part of a page. */
export function startsOf(page) {
  const [ends, text, starts] = [endsOf(page), textOf(page), [page.header.start]];
  for (let even = PART_TOKENS; even < page.count; even += PART_TOKENS) {
    const last = Math.min(even + LINE_TOKENS, page.count);
    let line = even;
    while (line < last && text[ends[line - 1] - 1] !== "\n") line++;
    starts.push(page.header.start + (line < last ? line : even));
  }
  return starts;
}

/** Ends of the pieces; without a tokenizer the ids are the text. */
export function endsOf(page) {
  if (!page.ends) {
    if (page.columns.end?.length) page.ends = page.columns.end;
    else {
      let end = 0;
      page.ends = Uint32Array.from(page.columns.id, (id) => (end += String(id).length + 1));
    }
  }
  return page.ends;
}

export function textOf(page) {
  return page.columns.end?.length ? page.text : Array.from(page.columns.id, (id) => `${id} `).join("");
}

export function tokenOfOffset(ends, offset) {
  let [low, high] = [0, ends.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}
