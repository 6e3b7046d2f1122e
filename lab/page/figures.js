// The figures that figures.py put on the page, and numbers as texts: dropped.js and worth.js use both.
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "");
const times = (before, after) => `${(before / after).toFixed(2)}×`;
const milliseconds = (seconds, of = seconds) => (1e3 * seconds).toFixed(of > 0.1 ? 0 : 1);
const gigabytes = (bytes, of = bytes) => (bytes / 1e9).toFixed(of >= 1e11 ? 0 : of >= 1e10 ? 1 : 3);
