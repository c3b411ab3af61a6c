/** Demo mode: a simulated run played through the same reducer. */

import { ApiError } from "../api/client";
import type { Backend } from "../state/backend";

export const demo: Backend = {
  start() {
    return () => undefined;
  },
  transport(path) {
    return Promise.reject(new ApiError(`Demo mode has no answer for ${path}.`, { status: 404, code: "not_found" }));
  },
};
