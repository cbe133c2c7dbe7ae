// What a run ran on, whatever its file says: plain values by name, what has parts in a part of its own, and lists of
// such as a table.

const isParts = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isRows = (value) => Array.isArray(value) && value.length > 0 && value.every(isParts);

function environment(found) {
  const entries = Object.entries(found);
  const plain = entries.filter(([, value]) => !isParts(value) && !isRows(value));
  return [facts(plain.map(([name, value]) => [name, plainText(value, name === "command" ? " " : ", ")])), ...entries.filter((entry) => !plain.includes(entry)).map(environmentPart)];
}

function environmentPart([name, value]) {
  const rows = isRows(value) ? value : [];
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const body = rows.length ? table(names, rows.map((row) => names.map((each) => plainText(row[each])))) : facts(Object.entries(value).map(([key, each]) => [key, plainText(each)]));
  return el("details", { open: rows.length > 0 }, el("summary", null, `${name} (${rows.length || Object.keys(value).length})`), body);
}

function plainText(value, separator = ", ") {
  if (Array.isArray(value)) return value.map((each) => plainText(each)).join(separator);
  return isParts(value) ? JSON.stringify(value) : String(value ?? "");
}
