// Numbers, times and names as text. Missing values are an en dash.

export const NONE = "–";

/** @param {number|null|undefined} x */
export function isNumber(x) {
  return typeof x === "number" && Number.isFinite(x);
}

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A number with three significant digits. @param {number|null|undefined} x */
export function num(x) {
  if (!isNumber(x)) return NONE;
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1000 || (Number.isInteger(x) && size < 1000)) return minus(WHOLE.format(x));
  if (size < 1e-4) return minus(x.toExponential(1));
  return minus(String(Number(x.toPrecision(3))));
}

/** A count with separators. */
export function int(x) {
  return isNumber(x) ? minus(WHOLE.format(x)) : NONE;
}

/** A count in at most four characters: 1.2k, 35M. */
export function compact(x) {
  if (!isNumber(x)) return NONE;
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(x) >= Number(limit)) return minus(`${Number((x / Number(limit)).toPrecision(2))}${unit}`);
  }
  return minus(String(Number(x.toPrecision(3))));
}

/** A share as a percentage. */
export function pct(x) {
  if (!isNumber(x)) return NONE;
  const value = 100 * x;
  return `${Math.abs(value) > 0 && Math.abs(value) < 10 ? Number(value.toFixed(1)) : Math.round(value)} %`;
}

/** A signed number. */
export function signed(x, digits = 3) {
  if (!isNumber(x)) return NONE;
  const text = minus(String(Number(x.toPrecision(digits))));
  return x > 0 ? `+${text}` : text;
}

/** A duration. @param {number|null|undefined} s */
export function secs(s) {
  if (!isNumber(s)) return NONE;
  if (s > 0 && s < 0.0995) return `${Math.max(1, Math.round(s * 1000))} ms`;
  if (s < 9.95) return `${Number(s.toFixed(1))} s`;
  if (s < 60) return `${Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s % 60 >= 1 ? ` ${Math.floor(s % 60)} s` : ""}`;
  if (s < 86400) return `${Math.floor(s / 3600)} h${s % 3600 >= 60 ? ` ${Math.floor((s % 3600) / 60)} min` : ""}`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** How long ago a Unix time is. */
export function ago(time) {
  if (!isNumber(time) || time <= 0) return NONE;
  const s = Date.now() / 1000 - time;
  return s < 5 ? "now" : `${secs(s < 60 ? Math.round(s) : 60 * Math.round(s / 60))} ago`;
}

/** A Unix time as local date and time. */
export function when(time) {
  if (!isNumber(time) || time <= 0) return NONE;
  const at = new Date(time * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function size(bytes) {
  if (!isNumber(bytes)) return NONE;
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = bytes / 1024;
  let unit = 0;
  for (; value >= 1000 && unit < 3; unit++) value /= 1024;
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

/** "1 call", "3 calls". */
export function plural(n, one, many = `${one}s`) {
  return `${int(n)} ${n === 1 ? one : many}`;
}

/** A key such as max_logprob_gap as words. */
export function words(key) {
  return String(key ?? "").replace(/_s$/, "").replaceAll("_", " ");
}

/** Whether a phase is of the run's held-out score: its first evaluation; those of others end in .NAME. */
export function isHeldOut(phase) {
  return phase.startsWith("eval") && !phase.includes(".");
}

function minus(text) {
  return text.replaceAll("-", "−");
}
