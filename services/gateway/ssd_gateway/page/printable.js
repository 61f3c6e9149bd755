/** Text of others, fit to be shown: nothing in it drives, hides or reorders what is around it. */

const CONTROLS = /[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g;
const UNSEEN = new RegExp(
  "[\\u0080-\\u009f" + // controls of eight bits
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069" + // directions
    "\\u2028\\u2029\\u2061-\\u2065\\u206a-\\u206f\\u3164\\uffa0\\ufff9-\\ufffb" +
    "\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e007f}]", // tags can hide sentences
  "gu",
);
const DROPPED = /[\r\u00ad\u034f\u180e\u200b\u2060\ufeff]/g;

/** Returns the text with a visible symbol for each control character: ␛ for an escape. */
export function printable(text) {
  return text
    .replace(DROPPED, "")
    .replace(CONTROLS, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)))
    .replace(/\u007f/g, "\u2421")
    .replace(UNSEEN, "\ufffd");
}
